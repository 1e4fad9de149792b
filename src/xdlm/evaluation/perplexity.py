"""Perplexity as a record: planned first, so that one can look whether it is there already, then measured.

For example:

    model = load("pocket")
    rows = model.pack(["It was a dark night."])
    plan = plan_perplexity(model, "pocket", "a sentence", rows)
    append_records(Path("results.jsonl"), [measure_perplexity(model, plan, rows)])
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

from xdlm.data import Rows
from xdlm.errors import UserError
from xdlm.evaluation.likelihood import counted_rows
from xdlm.evaluation.provenance import provenance
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.subject import Progress, Subject, unseen

#: The name under which the mean over the zero-shot sets is recorded.
ZERO_SHOT_MEAN = "zero-shot"


def plan_perplexity(
    model: Subject,
    name: str,
    source: str,
    rows: Rows,
    *,
    draws: int = 4,
    seed: int = 0,
    max_rows: int | None = None,
) -> EvalRecord:
    """The record of a measurement that has yet to be made. `name` and `source` are what the model and the
    text are called."""
    n = sum(counted_rows(rows, max_rows))
    if n < 1:
        raise UserError(f"there is no text to evaluate in {source}, with max_rows {max_rows}")
    return EvalRecord(
        "ppl", None, None, n, seed, name, data=source, data_sha256=rows.digest, length=rows.length,
        draws=1 if model.config.process.is_autoregressive else draws, **provenance(model),
    )  # fmt: skip


def measure_perplexity(
    model: Subject,
    plan: EvalRecord,
    rows: Rows,
    *,
    batch: int = 16,
    row_nats: bool = False,
    progress: Progress = unseen,
) -> EvalRecord:
    """The planned record, filled in; with what each row came to, if asked."""
    if plan.draws is None or plan.data_sha256 != rows.digest:
        raise UserError(f"the plan is not one of these rows' perplexity, but of {plan.data}'s")
    with progress(f"evaluating {plan.data}") as show:
        result = model.perplexity_of(
            rows, draws=plan.draws, seed=plan.seed, batch=batch, max_rows=plan.n, on_batch=show
        )
    assert result.n_rows == plan.n
    details: dict[str, float] = {
        "nats_per_token": result.nats_per_token,
        "nats_stderr": result.nats_stderr,
        "tokens": result.n_tokens,
        "documents": rows.n_documents,
    }
    if result.bits_per_character is not None:
        details["bits_per_character"] = result.bits_per_character
    return dataclasses.replace(
        plan, value=result.value, stderr=result.stderr, details=details,
        row_nats=[round(nats, 3) for nats in result.row_nats] if row_nats else None,
    )  # fmt: skip


def mean_perplexity(records: Sequence[EvalRecord]) -> EvalRecord:
    """The mean of several texts' perplexities, each text counting once, as the papers have it."""
    hashes = " ".join(str(r.data_sha256) for r in records)
    values = [math.inf if r.value is None else r.value for r in records]
    errors = [math.nan if r.stderr is None else r.stderr for r in records]
    return dataclasses.replace(
        records[0], data=ZERO_SHOT_MEAN, data_sha256=hashlib.sha256(hashes.encode()).hexdigest(),
        value=sum(values) / len(values), stderr=math.hypot(*errors) / len(errors),
        n=sum(r.n for r in records), details={"texts": len(records)}, row_nats=None,
    )  # fmt: skip
