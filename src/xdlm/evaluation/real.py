"""Real text, and the same with its tokens shuffled, under the judge of generated text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from xdlm.data import Rows
from xdlm.errors import UserError
from xdlm.evaluation.frontier import Mauve
from xdlm.evaluation.generation import quality
from xdlm.evaluation.judges import Judge
from xdlm.evaluation.provenance import provenance
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.subject import Progress, Subject, unseen
from xdlm.evaluation.writing import expected, filled

REAL, SHUFFLED = "real", "real_shuffled"


class RealText:
    """Rows of real text spread over a source, and the same with their tokens in random order. Rows are as
    long as the generated texts that they stand beside."""

    def __init__(self, model: Subject, source: str, rows: Rows, *, n: int, seed: int = 0) -> None:
        if len(rows) == 0:
            raise UserError(f"{source} is shorter than one row of {rows.length} tokens")
        spread = np.linspace(0, len(rows) - 1, min(n, len(rows))).astype(np.int64)
        real = list(rows.take(spread))
        generator = np.random.default_rng(seed)
        self._kinds = {REAL: real, SHUFFLED: [generator.permutation(ids) for ids in real]}
        self._model, self._seed, self._length = model, seed, rows.length
        self.source, self.digest = source, rows.digest
        self.texts = self._decoded(real)

    def expected(self, name: str, judge: Judge) -> list[EvalRecord]:
        """What will be recorded of it; `name` is what the model is called."""
        plans = {kind: self._plan(name, judge, kind) for kind in self._kinds}
        return [r for kind, plan in plans.items() for r in expected(plan, f"{kind}_")]

    def judged(
        self, name: str, judge: Judge, *, mauve: Mauve | None = None, progress: Progress = unseen
    ) -> dict[str, list[EvalRecord]]:
        """Records of both kinds; only what is shuffled has a distance from real text."""
        records = {}
        for kind, tokens in self._kinds.items():
            texts = self._decoded(tokens)
            with progress(f"judging {kind.replace('_', ', ')}") as show:
                found = quality(texts, tokens, judge, show)
            records[kind] = filled(self._plan(name, judge, kind), found, f"{kind}_")
            if mauve is not None and kind == SHUFFLED:
                record = mauve.record(records[kind][0], texts, progress=progress)
                records[kind].append(dataclasses.replace(record, metric=f"{kind}_{record.metric}"))
        return records

    def _plan(self, name: str, judge: Judge, kind: str) -> EvalRecord:
        return EvalRecord(
            f"{kind}_ppl", None, None, len(self.texts), self._seed, name, data=self.source,
            data_sha256=self.digest, length=self._length, judge=judge.name,
            judge_sha256=judge.sha256, **provenance(self._model),
        )  # fmt: skip

    def _decoded(self, tokens: Sequence[NDArray[np.int64]]) -> list[str]:
        return [self._model.tokenizer.decode(ids) for ids in tokens]


def is_judge_of_text(judged: Mapping[str, Sequence[EvalRecord]]) -> bool:
    """Whether a judge ranks real text above the same text shuffled; if not, what it says of other texts
    means nothing."""
    real, shuffled = (judged[kind][0].value for kind in (REAL, SHUFFLED))
    return real is not None and real < (math.inf if shuffled is None else shuffled)
