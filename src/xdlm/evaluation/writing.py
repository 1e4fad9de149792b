"""The quality of generated text as records: planned first, then texts are made and judged.

For example:

    model = load("pocket")
    judge = open_judge("ngram", model.tokenizer, torch.device("cpu"))
    plan = plan_writing(model, "pocket", judge, n=8, steps=32)
    texts, records = measure_writing(model, plan, judge)
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from xdlm.errors import UserError
from xdlm.evaluation.generation import N_GRAMS, Mean, Quality, quality
from xdlm.evaluation.judges import Judge
from xdlm.evaluation.provenance import provenance
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.subject import Progress, Subject, Written, unseen
from xdlm.sampling import THINNED
from xdlm.sampling.writing import BATCH_TOKENS

#: In the name of a sampler that is not the model's own.
FOREIGN = " as "


def plan_writing(
    model: Subject,
    name: str,
    judge: Judge,
    *,
    n: int,
    steps: int,
    length: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    impl: str = THINNED,
) -> EvalRecord:
    """The record of a judgement that has yet to be made, of texts of the model called `name`."""
    return EvalRecord(
        "gen_ppl", None, None, n, seed, name, steps=steps, sampler=_sampler(model, impl),
        temperature=temperature, top_p=top_p, length=model.length if length is None else length,
        judge=judge.name, judge_sha256=judge.sha256, **provenance(model),
    )  # fmt: skip


def measure_writing(
    model: Subject, plan: EvalRecord, judge: Judge, *, progress: Progress = unseen
) -> tuple[Written, list[EvalRecord]]:
    """Make texts as planned and judge them; the judge's perplexity comes first."""
    out = write_texts(model, plan, progress=progress)
    return out, judge_texts(out, plan, judge, progress=progress)


def write_texts(
    model: Subject,
    plan: EvalRecord,
    *,
    batch_tokens: int = BATCH_TOKENS,
    trajectory: bool = False,
    progress: Progress = unseen,
) -> Written:
    """Make texts as planned, whoever will judge them, so many tokens at a time; how they came about is kept
    with them on request."""
    if plan.steps is None or plan.temperature is None or plan.top_p is None or plan.sampler is None:
        raise UserError(f"the plan is one of {plan.metric}, not of generated texts")
    with progress(f"sampling in {plan.steps} steps") as show:
        return model.sample(
            plan.n, steps=plan.steps, length=plan.length, seed=plan.seed,
            temperature=plan.temperature, top_p=plan.top_p, impl=plan.sampler.split(FOREIGN)[0],
            batch_tokens=batch_tokens, trajectory=trajectory, on_step=show,
        )  # fmt: skip


def judge_texts(
    out: Written, plan: EvalRecord, judge: Judge, *, progress: Progress = unseen
) -> list[EvalRecord]:
    """The records of texts that were made as planned, under the plan's judge."""
    assert plan.judge_sha256 == judge.sha256
    ids = [np.asarray(row) for row in out.tokens.cpu().numpy()]
    with progress("judging") as show:
        found = quality(out.text, ids, judge, show)
    return filled(dataclasses.replace(plan, nfe=out.nfe), found)


def _sampler(model: Subject, impl: str) -> str:
    """How it draws, and the noise that it undoes where that is not the model's own."""
    noise = model.sampled_as
    return impl if noise is None else f"{impl}{FOREIGN}{noise.kind}, k = {noise.k:g}"


def expected(plan: EvalRecord, prefix: str = "") -> list[EvalRecord]:
    """The planned record and those of what needs no judge, in the order of the results."""
    alone = dataclasses.replace(plan, judge=None, judge_sha256=None)
    names = ["entropy", *(f"distinct_{n}" for n in N_GRAMS)]
    return [plan, *(dataclasses.replace(alone, metric=prefix + name) for name in names)]


def filled(plan: EvalRecord, found: Quality, prefix: str = "") -> list[EvalRecord]:
    """The expected records, filled in."""
    assert found.n == plan.n, "no text may be dropped"
    values = [
        found.perplexity,
        found.entropy,
        *(Mean(x, math.nan) for x in found.distinct.values()),
    ]
    records = [
        dataclasses.replace(record, value=mean.value, stderr=mean.stderr)
        for record, mean in zip(expected(plan, prefix), values, strict=True)
    ]
    records[0] = dataclasses.replace(records[0], details={"judge_tokens": found.judge_tokens})
    return records
