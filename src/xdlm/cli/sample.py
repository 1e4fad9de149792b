"""`xdlm sample`: generate text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from xdlm.api import Model, TextSample, load
from xdlm.blanks import BlankRule
from xdlm.cli.options import parse
from xdlm.cli.progress import console, progress, waiting
from xdlm.cli.record import write_json
from xdlm.errors import UserError, check_seed
from xdlm.evaluation.provenance import provenance
from xdlm.files import check_file
from xdlm.sampling import How, configure
from xdlm.sampling.writing import Config

_DESCRIPTION = """Generate text with a model; without options, with the bundled one.

The text (and with --show its steps) goes to standard output, the rest to standard error.

examples:
  xdlm sample
  xdlm sample --n 4 --steps 64 --temperature 0.8 --seed 1
  xdlm sample --prompt "It was a dark night, and"
  xdlm sample --template "The <mask:12> sat on the mat." --show
  xdlm sample --template "The <mask:3> said." --blank "choices:old king|young queen" --banned id:0
  xdlm sample --prompt "He said that" --sampler confidence --block-length 32 --new-tokens 64 --stop
  xdlm sample --n 4 --trajectory run.html
  xdlm sample --trajectory run.json && xdlm view run.json
"""
#: Settings that go into the JSON record, beside the sampler's own.
_RECORDED = (
    "model",
    "n",
    "length",
    "new_tokens",
    "seed",
    "prompt",
    "template",
    "stop",
    "banned",
    "forced",
    "blank",
    "sampler",
    "k",
)


@dataclass(frozen=True)
class Options:
    model: str = "pocket"
    """A bundled name, a checkpoint folder or a run folder."""
    n: int = 1
    """Number of texts."""
    steps: int = 32
    """Sampling steps; the ancestral sampler adds a final denoise."""
    length: int | None = None
    """Tokens per text, its prompt included; by default as in training."""
    new_tokens: int | None = None
    """Tokens to write after the prompt, instead of --length."""
    seed: int = 0
    """Same seed, same text."""
    prompt: str = ""
    """Text to begin with; it is never changed."""
    template: str | None = None
    """Text with holes to fill: <mask:12> is a hole of 12 tokens, with the space before it."""
    temperature: float = 1.0
    """Below 1 is more careful, 0 takes the most likely token."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together have this probability."""
    sampler: Literal["ancestral", "confidence"] = "ancestral"
    """ancestral draws exact reverse steps from the model; confidence fills the surest masks first and,
    where the noise has a uniform part, rewrites tokens that it doubts (the paper's Algorithm 1)."""
    last: Literal["sample", "argmax"] | None = None
    """ancestral: how the final denoise picks tokens (default sample)."""
    impl: str | None = None
    """ancestral: thinned is fast and exact (default), dense is its slow twin; gumbel draws with float32
    noise as published implementations do, which starves rare tokens; starved has nearly that law."""
    block_length: int | None = None
    """confidence: write in blocks of this many tokens, one after the other; by default all at once."""
    guidance: float | None = None
    """confidence: strength of guidance by the prompt; 1 is off (default)."""
    confidence: Literal["token", "entropy", "margin", "random"] | None = None
    """confidence: what is filled first: where the token drawn is likeliest (token, default), the prediction
    has the lowest entropy or the widest margin, or anywhere."""
    refresh: int | None = None
    """confidence: run the model on the whole text only once in this many steps, and on the current block in
    the others: faster, but an approximation; by default on the whole text in every step."""
    stop: bool = False
    """End each text where the model writes the end-of-text token."""
    banned: tuple[str, ...] = ()
    """Tokens never to write: each a text that is one token, or id:NUMBER."""
    forced: tuple[str, ...] = ()
    """Tokens at given positions of the template, counted from 0: POSITION=TOKEN or POSITION=id:NUMBER."""
    blank: tuple[str, ...] = ()
    """What each hole of the template may hold, in order: "regex:[a-z ]+", "choices:old king|queen",
    or any. It must fill the hole's tokens exactly."""
    k: float | None = None
    """Sample as if the model had been trained with mixed noise of this ratio k; with the confidence
    sampler, 0 rewrites nothing, as in LLaDA."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights (ema), or the last ones of training (raw)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the trunk."""
    device: str = "auto"
    """auto, cpu or cuda."""
    show: bool = False
    """Show the first text taking shape, step by step, in colour."""
    trajectory: str | None = None
    """Write every step to this file: a self-contained page (.html), data (.json, see `xdlm view`), or the
    first text as a picture (.svg) or film (.gif, needs pillow)."""
    json: str | None = None
    """Write texts, tokens and settings to this file as JSON."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm sample", description=_DESCRIPTION)
    _check(options)
    with waiting(f"reading {options.model}"):
        model = load(
            options.model, device=options.device, weights=options.weights,
            precision=options.precision,
        )  # fmt: skip
    model = model if options.k is None else model.mixed(options.k)
    result = _draw(model, options)
    _save(model, options, result)  # first: a full disk should not come after a screenful of text
    if options.show and result.trajectory is not None:
        from xdlm.report import trajectory_panel

        console(stderr=False).print(trajectory_panel(result.trajectory, model.tokenizer))
    for i, text in enumerate(result.text):
        if options.n > 1:
            print(f"--- {i} ---")
        print(text)
    ended = f", {sum(result.stopped)} of {options.n} ended" if options.stop else ""
    console().print(
        f"{options.model} ({model.weights} weights): {options.steps} "
        f"{'step' if options.steps == 1 else 'steps'}, "
        f"{result.nfe} forward passes"
        f"{ended}",
        style="dim",
    )  # fmt: skip


def _check(options: Options) -> None:
    """What needs no model to be seen."""
    check_seed(options.seed, name="--seed")
    fixed = options.prompt or options.stop or (options.length, options.new_tokens) != (None, None)
    if options.template is not None and fixed:
        raise UserError(
            "--template sets prompt and length itself; leave out --prompt, --length, --new-tokens and "
            "--stop"
        )
    if options.template is None and (options.forced or options.blank):
        raise UserError("--forced and --blank need a --template: they say what its holes may hold")
    if options.trajectory is not None:
        from xdlm.report.exporting import check_target

        check_target(Path(options.trajectory))
    if options.json is not None:
        check_file(Path(options.json))


def _save(model: Model, options: Options, result: TextSample) -> None:
    """The files that were asked for."""
    if options.trajectory is not None and result.trajectory is not None:
        from xdlm.report.exporting import export
        from xdlm.report.recording import Recording, run_details

        details = run_details(
            options.model, model, _config(model, options), seed=options.seed, nfe=result.nfe
        )
        recording = Recording.of(result.trajectory, model.tokenizer, details)
        export(recording, Path(options.trajectory), title="How the text came about")
    if options.json is not None:
        record = {
            **provenance(model),
            **{field: getattr(options, field) for field in _RECORDED},
            **_settings(model, options),
            "nfe": result.nfe,
            "stopped": result.stopped,
            "text": result.text,
            "tokens": result.tokens.tolist(),
        }
        write_json(Path(options.json), record)


def _how(options: Options) -> How:
    """The sampler's settings that were given."""
    given = {name: getattr(options, name) for name in How.__annotations__}
    return cast(How, {name: value for name, value in given.items() if value is not None})


def _config(model: Model, options: Options) -> Config:
    assert model.process is not None
    return configure(_how(options), model.process)


def _settings(model: Model, options: Options) -> dict[str, Any]:
    """All of the sampler's settings, defaults included."""
    settings = dataclasses.asdict(_config(model, options))
    return {**settings.pop("filter"), **settings}


def _draw(model: Model, options: Options) -> TextSample:
    record, how = options.show or options.trajectory is not None, _how(options)
    with progress("sampling") as show:
        if options.template is not None:
            return model.infill(
                options.template, n=options.n, seed=options.seed,
                forced=dict(_forced(text) for text in options.forced),
                banned=[_token(text) for text in options.banned],
                blanks=[_rule(text) for text in options.blank],
                trajectory=record, on_step=show, **how,
            )  # fmt: skip
        return model.sample(
            options.n, prompt=options.prompt, length=options.length,
            new_tokens=options.new_tokens, seed=options.seed, stop=options.stop,
            banned=[_token(text) for text in options.banned],
            trajectory=record, on_step=show, **how,
        )  # fmt: skip


def _token(text: str) -> int | str:
    number = text.removeprefix("id:")
    return int(number) if number != text and number.isdecimal() else text


def _forced(text: str) -> tuple[int, int | str]:
    position, equals, token = text.partition("=")
    if not (equals and position.isdecimal()):
        raise UserError(f"--forced takes POSITION=TOKEN, got '{text}'")
    return int(position), _token(token)


def _rule(text: str) -> BlankRule | None:
    kind, _, what = text.partition(":")
    if text == "any":
        return None
    if kind == "regex":
        return BlankRule(regex=what)
    if kind == "choices" and what:
        return BlankRule(choices=what.split("|"))
    raise UserError(f"--blank takes regex:EXPRESSION, choices:A|B|C or any, got '{text}'")
