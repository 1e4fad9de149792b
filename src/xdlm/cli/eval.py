"""`xdlm eval ppl`: perplexity of a text under a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xdlm.api import load
from xdlm.cli.options import parse
from xdlm.cli.progress import progress
from xdlm.cli.record import provenance, write_json
from xdlm.data import load_rows
from xdlm.errors import UserError, did_you_mean

_DESCRIPTION = """Perplexity: an upper bound by Monte Carlo, with its standard error.

All terms of the bound are counted, the first step from pure noise and the final denoise included;
every token counts once, the end of the text (less than a row) too.

examples:
  xdlm eval ppl
  xdlm eval ppl --model runs/mine --data my-texts/ --draws 16 --json result.json
"""


@dataclass(frozen=True)
class PplOptions:
    model: str = "pocket"
    """A bundled name, a checkpoint folder or a run folder."""
    data: str = "corpus:heldout"
    """Text: corpus:heldout, a corpus of the papers (ptb:test), a file, or a folder of files or of
    shards that `xdlm prepare` made."""
    draws: int = 4
    """Times at which the bound's integrand is looked at, per row."""
    max_rows: int | None = None
    """Look at only so many rows."""
    batch: int = 16
    """Rows that go through the model at a time."""
    seed: int = 0
    """Decides times and noise."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights, or those that training left."""
    device: str = "auto"
    """auto, cpu or cuda."""
    json: str | None = None
    """Write the result as JSON."""


def run(arguments: list[str]) -> None:
    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            parse(PplOptions, ["--help"], prog="xdlm eval ppl", description=_DESCRIPTION)
        raise UserError("which measure? for example: xdlm eval ppl")
    if arguments[0] not in MEASURES:
        word = arguments[0]
        raise UserError(f"unknown measure '{word}'{did_you_mean(word, MEASURES)}")
    MEASURES[arguments[0]](arguments[1:])


def ppl(arguments: list[str]) -> None:
    options = parse(PplOptions, arguments, prog="xdlm eval ppl", description=_DESCRIPTION)
    model = load(options.model, device=options.device, weights=options.weights)
    data = model.config.data
    rows = load_rows(
        options.data, model.tokenizer, data.length, bos=data.bos, eos=data.eos, frame=data.frame
    )
    with progress("evaluating") as show:
        result = model.perplexity_of(
            rows, draws=options.draws, seed=options.seed, batch=options.batch,
            max_rows=options.max_rows, on_batch=show,
        )  # fmt: skip
    if options.json is not None:
        record = {
            "metric": "ppl", **dataclasses.asdict(result), "model": options.model,
            "data": options.data, **provenance(model),
        }  # fmt: skip
        write_json(Path(options.json), record)
    print(f"perplexity  {result.value:.3f} ± {result.stderr:.3f}")
    print(f"nats/token  {result.nats_per_token:.4f} ± {result.nats_stderr:.4f}")
    if result.bits_per_character is not None:
        print(f"bits/char   {result.bits_per_character:.4f}")
    print(f"tokens      {result.n_tokens:,} in {result.n_rows:,} rows, {result.draws} draws each")
    print(f"weights     {model.weights}")


#: What can be measured. A new measure is a function and a line here.
MEASURES: dict[str, Callable[[list[str]], None]] = {"ppl": ppl}
