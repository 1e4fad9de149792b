"""`xdlm eval gen`: how well a model writes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from xdlm.api import Model, TextSample, load
from xdlm.cli.measures.common import (
    Running,
    Writing,
    check_target,
    keep,
    read_rows,
    show_table,
    with_error,
)
from xdlm.cli.options import parse
from xdlm.cli.progress import console, progress
from xdlm.cli.record import provenance
from xdlm.data import Rows
from xdlm.errors import UserError
from xdlm.evaluation.frontier import check_mauve, features, mauve
from xdlm.evaluation.generation import N_GRAMS, Mean, Quality, quality
from xdlm.evaluation.judges import FeatureJudge, Judge, open_judge
from xdlm.evaluation.records import EvalRecord
from xdlm.files import check_writable, write_atomic

_DESCRIPTION = """Quality of generated text for several numbers of sampling steps: perplexity under a judge
(over all of the judge's tokens), entropy of each text's own token frequencies, the share of n-grams that do
not repeat, and MAUVE on request. Real text and the same text with its tokens shuffled stand beside it.

A judge is `ngram` (trigrams of the embedded novels, no download), a folder with any causal language model
of the transformers library, or a .gguf file. Figures under different judges do not compare.

examples:
  xdlm eval gen --steps 4 16 64
  xdlm eval gen --model runs/owt --judge models/gpt2-large --n 256 --records results.jsonl --samples texts/
  xdlm eval gen --model runs/owt --judge models/gpt2-large --n 1000 --mauve --data openwebtext:validation
"""

Texts = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Options(Running, Writing):
    model: str = "pocket"
    """A bundled name, a checkpoint folder or a run folder."""
    steps: tuple[int, ...] = (8, 32, 128)
    """Numbers of sampling steps; the final denoise comes on top."""
    length: int | None = None
    """Tokens per text; by default a row's."""
    data: str = "corpus:heldout"
    """Real text to set beside."""
    mauve: bool = False
    """Compare generated with real text by MAUVE too: needs a causal language model as judge, xdlm[eval],
    and many texts."""
    samples: str | None = None
    """Keep the texts in this folder, a file of JSON lines per number of steps."""
    records: str | None = None
    """Append the results to this file, one line of JSON each."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm eval gen", description=_DESCRIPTION)
    if not options.steps:
        raise UserError("--steps needs at least one number")
    check_settings(options.steps, options.n)
    check_target(options.records)
    if options.samples is not None:
        check_writable(Path(options.samples))
    model = load(options.model, device=options.device, weights=options.weights)
    judge = open_judge(options.judge, model.tokenizer, model.denoiser.head_weight.device)
    rows = read_rows(model, options.data)
    real = RealText(model, options.data, rows, options.n, options.length, options.seed)
    measure = None
    if options.mauve:
        measure = Mauve(check_mauve(judge, min(options.n, len(real.texts))), real, options.seed)
    columns = ["judge's perplexity", "entropy", "distinct-1/2/3"] + ["MAUVE"] * options.mauve
    table = Table("texts", *columns, "forward passes")
    for kind, records in real.judged(options.model, judge, measure).items():
        keep(options.records, *records)
        _add_row(table, kind.replace("_", ", "), records)
    for steps in options.steps:
        plan = planned(model, options.model, judge, steps, options, options.seed, options.length)
        out, records = written(model, plan, judge)
        if measure is not None:
            records.append(measure.record(records[0], out.text))
        _add_row(table, f"{steps} steps", records)
        if options.samples is not None:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in out.text)
            write_atomic(Path(options.samples) / f"steps-{steps:05d}.jsonl", lines)
        keep(options.records, *records)
    show_table(table, f"{options.model}, {options.n} texts each, judge: {judge.name}")


def check_settings(steps: Sequence[int], n: int) -> None:
    if min(steps, default=1) < 1 or n < 1:
        raise UserError("--steps and --n need numbers of at least 1")


def planned(
    model: Model,
    name: str,
    judge: Judge,
    steps: int,
    writing: Writing,
    seed: int,
    length: int | None,
) -> EvalRecord:
    """The record of a judgement that has yet to be made."""
    return EvalRecord(
        "gen_ppl", None, None, writing.n, seed, name, steps=steps, sampler="thinned",
        temperature=writing.temperature, top_p=writing.top_p, length=length or model.length,
        judge=judge.name, judge_sha256=judge.sha256, **provenance(model),
    )  # fmt: skip


def written(model: Model, plan: EvalRecord, judge: Judge) -> tuple[TextSample, list[EvalRecord]]:
    """Make texts as planned and judge them; the judge's perplexity comes first."""
    assert plan.steps and plan.temperature and plan.top_p
    with progress(f"sampling in {plan.steps} steps") as show:
        out = model.sample(
            plan.n, steps=plan.steps, length=plan.length, seed=plan.seed,
            temperature=plan.temperature, top_p=plan.top_p, trajectory=False, on_step=show,
        )  # fmt: skip
    ids = [np.asarray(row) for row in out.tokens.cpu().numpy()]
    with progress("judging") as show:
        found = quality(out.text, ids, judge, show)
    return out, quality_records(dataclasses.replace(plan, nfe=out.nfe), found)


def expected(plan: EvalRecord, prefix: str = "") -> list[EvalRecord]:
    """The planned record and those of what needs no judge, in the order of the results."""
    alone = dataclasses.replace(plan, judge=None, judge_sha256=None)
    names = ["entropy", *(f"distinct_{n}" for n in N_GRAMS)]
    return [plan, *(dataclasses.replace(alone, metric=prefix + name) for name in names)]


def quality_records(plan: EvalRecord, found: Quality, prefix: str = "") -> list[EvalRecord]:
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


class RealText:
    """Rows of real text spread over a source, and the same with their tokens in random order."""

    def __init__(
        self, model: Model, source: str, rows: Rows, n: int, length: int | None, seed: int
    ) -> None:
        if len(rows) == 0:
            raise UserError(f"{source} is shorter than one row of {rows.length} tokens")
        spread = np.linspace(0, len(rows) - 1, min(n, len(rows))).astype(np.int64)
        length = length or rows.length
        self.tokens: Texts = [ids[:length] for ids in rows.take(spread)]
        generator = np.random.default_rng(seed)
        self._kinds = {
            "real": self.tokens,
            "real_shuffled": [generator.permutation(ids) for ids in self.tokens],
        }
        self._model, self._seed = model, seed
        self.source, self.digest = source, rows.digest
        self.texts = self._decoded(self.tokens)

    def expected(self, name: str, judge: Judge) -> list[EvalRecord]:
        plans = {kind: self._plan(name, judge, kind) for kind in self._kinds}
        return [r for kind, plan in plans.items() for r in expected(plan, f"{kind}_")]

    def judged(
        self, name: str, judge: Judge, measure: Mauve | None = None
    ) -> dict[str, list[EvalRecord]]:
        """Records of both kinds. A judge that does not tell them apart is worth a word."""
        records = {}
        for kind, tokens in self._kinds.items():
            texts = self._decoded(tokens)
            with progress(f"judging {kind.replace('_', ', ')}") as show:
                found = quality(texts, tokens, judge, show)
            records[kind] = quality_records(self._plan(name, judge, kind), found, f"{kind}_")
            if measure is not None and tokens is not self.tokens:
                mauve_record = measure.record(records[kind][0], texts)
                records[kind].append(
                    dataclasses.replace(mauve_record, metric=f"{kind}_{mauve_record.metric}")
                )
        real, shuffled = (found[0] for found in records.values())
        if (real.value or 0.0) >= (shuffled.value or 0.0):
            console().print(
                f"{judge.name} does not rank real text above the same text shuffled: what it says of "
                "other texts means nothing", markup=False,
            )  # fmt: skip
        return records

    def _plan(self, name: str, judge: Judge, kind: str) -> EvalRecord:
        return EvalRecord(
            f"{kind}_ppl", None, None, len(self.tokens), self._seed, name, data=self.source,
            data_sha256=self.digest, length=len(self.tokens[0]), judge=judge.name,
            judge_sha256=judge.sha256, **provenance(self._model),
        )  # fmt: skip

    def _decoded(self, tokens: Texts) -> list[str]:
        return [self._model.tokenizer.decode(ids) for ids in tokens]


class Mauve:
    """Distance from real text, whose features are worked out once."""

    def __init__(self, judge: FeatureJudge, real: RealText, seed: int) -> None:
        self._judge, self._seed = judge, seed
        self._source, self._digest = real.source, real.digest
        with progress("features of real text") as show:
            self._real = features(judge, real.texts, show)

    def record(self, like: EvalRecord, texts: list[str]) -> EvalRecord:
        with progress("features") as show:
            score = mauve(self._real, features(self._judge, texts, show), seed=self._seed)
        return dataclasses.replace(
            like, metric="mauve", value=score, stderr=None, data=self._source,
            data_sha256=self._digest,
            details={"real_texts": len(self._real)},
        )  # fmt: skip


def _add_row(table: Table, name: str, records: Sequence[EvalRecord]) -> None:
    ppl, entropy, *shares = records[:5]
    more = [with_error(r.value, r.stderr, 3) for r in records[5:]]
    if len(table.columns) == 6 and not more:
        more = [""]
    table.add_row(
        name, with_error(ppl.value, ppl.stderr), with_error(entropy.value, entropy.stderr, 3),
        " / ".join("" if r.value is None else f"{r.value:.2f}" for r in shares), *more,
        "" if ppl.nfe is None else f"{ppl.nfe:.0f}",
    )  # fmt: skip
