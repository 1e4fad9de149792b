"""`xdlm eval ppl`: how well a model predicts text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from xdlm.cli.measures.common import (
    Reading,
    Running,
    check_settings,
    check_target,
    is_known,
    keep,
    opened,
    own_text,
    packing_rule,
    read_rows,
    show_table,
    with_error,
)
from xdlm.cli.options import parse
from xdlm.cli.progress import progress
from xdlm.data import ZERO_SHOT
from xdlm.errors import UserError
from xdlm.evaluation.perplexity import mean_perplexity, measure_perplexity, plan_perplexity
from xdlm.evaluation.records import EvalRecord

_DESCRIPTION = """Perplexity: an upper bound by Monte Carlo, with its standard error; exact for an
autoregressive model, over all tokens that have one before them in their row.

All terms of the bound are counted, the first step from pure noise and the final denoise included;
every token counts once, the end of the text (less than a row) too. Documents are joined as in training;
the rule is printed with the results. --zero-shot measures the papers' seven sets and their mean, after the
model's validation text or the texts of --data.

examples:
  xdlm eval ppl
  xdlm eval ppl --model runs/mine --data my-texts/ --draws 16 --records results.jsonl
  xdlm eval ppl --model runs/owt --zero-shot --records results.jsonl
"""


@dataclass(frozen=True)
class Options(Running, Reading):
    model: str = "pocket"
    """A bundled name, a checkpoint folder or a run folder."""
    data: tuple[str, ...] | None = None
    """Texts, by default what validated the model's training (or else corpus:heldout): a corpus of the
    papers (ptb:test), a file, or a folder of files or of shards that `xdlm prepare` made."""
    zero_shot: bool = False
    """Measure the papers' seven zero-shot sets too, and their mean."""
    records: str | None = None
    """Append the results to this file, one line of JSON each."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm eval ppl", description=_DESCRIPTION)
    check_settings(options)
    if options.data == () and not options.zero_shot:
        raise UserError("--data needs at least one text")
    check_target(options.records)
    model = opened(options.model, options)
    data = (own_text(model.config),) if options.data is None else options.data
    sources = [*data, *(ZERO_SHOT if options.zero_shot else ())]
    # All of them, before hours of work.
    texts = [(source, read_rows(model, source, options.length)) for source in sources]
    bound = "perplexity (at most)" if model.process is not None else "perplexity"
    table = Table("text", bound, "nats/token", "bits/char", "tokens", "rows", "documents")
    records = []
    for source, rows in texts:
        plan = plan_perplexity(
            model, options.model, source, rows, draws=options.draws, seed=options.seed,
            max_rows=options.max_rows,
        )  # fmt: skip
        record = measure_perplexity(
            model, plan, rows, batch=options.batch, row_nats=options.row_nats, progress=progress
        )
        keep(options.records, record)
        records.append(record)
        _add_row(table, record)
    if options.zero_shot:
        mean = mean_perplexity(records[-len(ZERO_SHOT) :])
        keep(options.records, mean)
        _add_row(table, mean)
    draws = f"{options.draws} draws a row" if model.process is not None else "exact"
    show_table(
        table,
        f"{options.model}, step {model.step:,}, {model.weights} weights, {draws}; "
        f"{packing_rule(model, options.length)}",
        *_remarks(records),
    )


def _remarks(records: Sequence[EvalRecord]) -> list[str]:
    """Why a figure stands there without its error, or is not there."""
    without = any(r.value != math.inf and not is_known(r.stderr) for r in records)
    cut = any("texts" not in r.details and "bits_per_character" not in r.details for r in records)
    return [
        *(["no error from one row and one draw"] if without else []),
        *(
            ["no bits/char where only some rows were read; documents are of the whole text"]
            if cut
            else []
        ),
    ]


def _add_row(table: Table, record: EvalRecord) -> None:
    found = record.details
    if "texts" in found:
        table.add_row(f"mean of {found['texts']:.0f}", with_error(record.value, record.stderr, 3))
        return
    bits = found.get("bits_per_character")
    table.add_row(
        record.data, with_error(record.value, record.stderr, 3),
        with_error(found["nats_per_token"], found["nats_stderr"], 4),
        "" if bits is None else f"{bits:.4f}", f"{found['tokens']:,.0f}", f"{record.n:,}",
        f"{found['documents']:,.0f}",
    )  # fmt: skip
