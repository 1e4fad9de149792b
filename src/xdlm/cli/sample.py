"""`xdlm sample`: generate text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from xdlm.api import Model, TextSample, load
from xdlm.cli.options import parse
from xdlm.cli.progress import console, progress
from xdlm.cli.record import write_json
from xdlm.errors import UserError
from xdlm.evaluation.provenance import provenance
from xdlm.files import write_atomic

_DESCRIPTION = """Generate text with a model; without options, with the bundled one.

The text (and with --show how it came about) goes to standard output, the rest to standard error.

examples:
  xdlm sample
  xdlm sample --n 4 --steps 64 --temperature 0.8 --seed 1
  xdlm sample --prefix "It was a dark night, and"
  xdlm sample --template "The <mask:12> sat on the mat." --show
  xdlm sample --html trajectory.html
"""
#: Settings that go into the JSON record.
_RECORDED = ("model", "n", "steps", "length", "seed", "prefix", "template", "temperature", "top_p",
             "last", "impl", "k")  # fmt: skip


@dataclass(frozen=True)
class Options:
    model: str = "pocket"
    """A bundled name, a checkpoint folder or a run folder."""
    n: int = 1
    """How many texts."""
    steps: int = 32
    """Reverse steps; the final denoise comes on top."""
    length: int | None = None
    """Tokens per text; by default as many as in a row of training."""
    seed: int = 0
    """Same seed, same text."""
    prefix: str = ""
    """Text to begin with; it is never changed."""
    template: str | None = None
    """Text with holes to fill: <mask:12> is a hole of 12 tokens, with the space before it."""
    temperature: float = 1.0
    """Below 1 is more careful, 0 takes the most likely token."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together have this probability."""
    last: Literal["sample", "argmax"] = "sample"
    """How the final denoise picks tokens."""
    impl: str = "thinned"
    """thinned is fast, dense its slow twin of the same law."""
    k: float | None = None
    """Sample as a model of mixed noise of this ratio, whatever noise it was trained with."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights, or those that training left."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the trunk computes in."""
    device: str = "auto"
    """auto, cpu or cuda."""
    show: bool = False
    """Show how the first text came about, step by step, in colour."""
    html: str | None = None
    """Write the trajectories as one self-contained page."""
    json: str | None = None
    """Write texts, tokens and settings as JSON."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm sample", description=_DESCRIPTION)
    if options.template is not None and (options.prefix or options.length is not None):
        raise UserError(
            "--template fixes prefix and length itself; leave --prefix and --length out"
        )
    model = load(
        options.model, device=options.device, weights=options.weights, precision=options.precision
    )
    model = model if options.k is None else model.mixed(options.k)
    result = _draw(model, options)
    # Files first: a bad path should not come after a screenful of text.
    if options.html is not None and result.trajectory is not None:
        from xdlm.report import trajectory_page

        page = trajectory_page(
            result.trajectory, model.tokenizer, title="How the text came about",
            details=_details(model, options, result),
        )  # fmt: skip
        write_atomic(Path(options.html), page)
    if options.json is not None:
        record = {
            **provenance(model),
            **{field: getattr(options, field) for field in _RECORDED},
            "nfe": result.nfe,
            "text": result.text,
            "tokens": result.tokens.tolist(),
        }
        write_json(Path(options.json), record)
    if options.show and result.trajectory is not None:
        from xdlm.report import trajectory_panel

        Console().print(trajectory_panel(result.trajectory, model.tokenizer))
    for i, text in enumerate(result.text):
        if options.n > 1:
            print(f"--- {i} ---")
        print(text)
    console().print(
        f"{options.model} ({model.weights} weights): {options.steps} steps, {result.nfe} forward passes",
        style="dim", highlight=False, markup=False,
    )  # fmt: skip


def _draw(model: Model, options: Options) -> TextSample:
    record = options.show or options.html is not None
    with progress("sampling") as show:
        if options.template is not None:
            return model.infill(
                options.template, n=options.n, steps=options.steps, seed=options.seed,
                temperature=options.temperature, top_p=options.top_p, last=options.last,
                impl=options.impl, trajectory=record, on_step=show,
            )  # fmt: skip
        return model.sample(
            options.n, steps=options.steps, length=options.length, seed=options.seed,
            prefix=options.prefix, temperature=options.temperature, top_p=options.top_p,
            last=options.last, impl=options.impl, trajectory=record, on_step=show,
        )  # fmt: skip


def _details(model: Model, options: Options, result: TextSample) -> dict[str, str]:
    process = model.sampled_as or model.config.process
    return {
        "model": f"{options.model}, step {model.step}, {model.weights} weights",
        "noise": process.kind + (f", k = {process.k}" if process.k is not None else ""),
        "steps": str(options.steps),
        "forward passes": str(result.nfe),
        "seed": str(options.seed),
        "temperature": str(options.temperature),
        "top-p": str(options.top_p),
    }
