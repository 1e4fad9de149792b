"""`xdlm eval ppl`: how well a model predicts text."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from xdlm.api import Model, load
from xdlm.cli.measures.common import (
    Reading,
    Running,
    check_target,
    keep,
    packing_rule,
    read_rows,
    show_table,
    with_error,
)
from xdlm.cli.options import parse
from xdlm.cli.progress import progress
from xdlm.cli.record import provenance
from xdlm.data import ZERO_SHOT, Rows
from xdlm.evaluation.likelihood import counted_rows
from xdlm.evaluation.records import EvalRecord

_DESCRIPTION = """Perplexity: an upper bound by Monte Carlo, with its standard error.

All terms of the bound are counted, the first step from pure noise and the final denoise included;
every token counts once, the end of the text (less than a row) too. Documents are joined as in training;
the rule is printed with the results. --zero-shot measures the papers' seven sets and their mean.

examples:
  xdlm eval ppl
  xdlm eval ppl --model runs/mine --data my-texts/ --draws 16 --records results.jsonl
  xdlm eval ppl --model runs/owt --data prepared/owt-val --zero-shot --records results.jsonl
"""
#: The name under which the mean over the zero-shot sets is recorded.
ZERO_SHOT_MEAN = "zero-shot"


@dataclass(frozen=True)
class Options(Running, Reading):
    model: str = "pocket"
    """A bundled name, a checkpoint folder or a run folder."""
    data: tuple[str, ...] = ()
    """Texts, by default corpus:heldout: a corpus of the papers (ptb:test), a file, or a folder of files
    or of shards that `xdlm prepare` made."""
    zero_shot: bool = False
    """Measure the papers' seven zero-shot sets too, and their mean."""
    records: str | None = None
    """Append the results to this file, one line of JSON each."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm eval ppl", description=_DESCRIPTION)
    sources = [*options.data, *(ZERO_SHOT if options.zero_shot else ())] or ["corpus:heldout"]
    check_target(options.records)
    model = load(options.model, device=options.device, weights=options.weights)
    # All of them, before hours of work.
    texts = [(source, read_rows(model, source, options.length)) for source in sources]
    table = Table("text", "perplexity", "nats/token", "bits/char", "tokens", "rows", "documents")
    records = []
    for source, rows in texts:
        plan = planned(model, options.model, source, rows, options.seed, options)
        record = measured(model, plan, rows, options)
        keep(options.records, record)
        records.append(record)
        _add_row(table, record)
    if options.zero_shot:
        mean = mean_of(records[-len(ZERO_SHOT) :])
        keep(options.records, mean)
        _add_row(table, mean)
    show_table(
        table,
        f"{options.model}, step {model.step:,}, {model.weights} weights, {options.draws} draws a row; "
        f"{packing_rule(model, options.length)}",
    )


def planned(
    model: Model, name: str, source: str, rows: Rows, seed: int, reading: Reading
) -> EvalRecord:
    """The record of a measurement that has yet to be made."""
    return EvalRecord(
        "ppl", None, None, sum(counted_rows(rows, reading.max_rows)), seed, name, data=source,
        data_sha256=rows.digest, length=rows.length, draws=reading.draws, **provenance(model),
    )  # fmt: skip


def measured(model: Model, plan: EvalRecord, rows: Rows, reading: Reading) -> EvalRecord:
    with progress(f"evaluating {plan.data}") as show:
        result = model.perplexity_of(
            rows, draws=reading.draws, seed=plan.seed, batch=reading.batch,
            max_rows=reading.max_rows, on_batch=show,
        )  # fmt: skip
    assert result.n_rows == plan.n
    details: dict[str, float] = {
        "nats_per_token": result.nats_per_token,
        "nats_stderr": result.nats_stderr,
        "tokens": result.n_tokens,
        "documents": rows.n_documents,
    }
    if result.bits_per_character is not None:
        details["bits_per_character"] = result.bits_per_character
    return dataclasses.replace(plan, value=result.value, stderr=result.stderr, details=details)


def mean_of(records: Sequence[EvalRecord]) -> EvalRecord:
    """The mean of several texts' perplexities, each text counting once, as the papers have it."""
    hashes = " ".join(str(r.data_sha256) for r in records)
    values = [math.inf if r.value is None else r.value for r in records]
    errors = [math.nan if r.stderr is None else r.stderr for r in records]
    return dataclasses.replace(
        records[0], data=ZERO_SHOT_MEAN, data_sha256=hashlib.sha256(hashes.encode()).hexdigest(),
        value=sum(values) / len(values), stderr=math.hypot(*errors) / len(errors),
        n=sum(r.n for r in records), details={"texts": len(records)},
    )  # fmt: skip


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
