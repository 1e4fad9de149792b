"""MAUVE: how far two sets of texts are from each other, between 0 and 1 (the same).

Texts become vectors (the judge's features), vectors become buckets (k-means), and the score is the area
under the curve of divergences of both histograms from their mixtures (Pillutla et al., 2021). It depends
on the judge and on how many texts there are: figures compare at the same number alone, and thousands are
usual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xdlm.errors import UserError
from xdlm.evaluation.judges import FeatureJudge, Judge
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.subject import Progress, unseen

#: The library makes a bucket of every ten texts, and needs two.
_FEWEST = 20


def check_mauve(judge: Judge, n: int) -> FeatureJudge:
    """Fail now, not after the texts have been made, if the score cannot be had."""
    if not isinstance(judge, FeatureJudge):
        raise UserError(
            f"MAUVE needs a judge with hidden states, and {judge.name} have none; give --judge a "
            "folder with a causal language model"
        )
    if n < _FEWEST:
        raise UserError(f"MAUVE needs at least {_FEWEST} texts of each kind, got {n}")
    _library()
    return judge


def features(
    judge: FeatureJudge,
    texts: Sequence[str],
    on_text: Callable[[int, int], None] | None = None,
) -> NDArray[np.float32]:
    """A row for each text."""
    rows = []
    for i, text in enumerate(texts):
        rows.append(judge.features(text))
        if on_text is not None:
            on_text(i + 1, len(texts))
    return np.stack(rows)


def mauve(real: NDArray[np.float32], other: NDArray[np.float32], *, seed: int) -> float:
    """The score of features [n, d]; `seed` decides where k-means starts."""
    return float(_library()(p_features=real, q_features=other, seed=seed).mauve)


class Mauve:
    """Distance from some real texts, whose features are worked out once. `source` and `digest` say where
    they are from."""

    def __init__(
        self,
        judge: FeatureJudge,
        texts: Sequence[str],
        *,
        source: str,
        digest: str,
        seed: int = 0,
        progress: Progress = unseen,
    ) -> None:
        self._judge, self._seed = judge, seed
        self._source, self._digest = source, digest
        with progress("features of real text") as show:
            self._real = features(judge, texts, show)

    def record(
        self, like: EvalRecord, texts: Sequence[str], *, progress: Progress = unseen
    ) -> EvalRecord:
        """Of texts that another record tells about."""
        with progress("features") as show:
            score = mauve(self._real, features(self._judge, texts, show), seed=self._seed)
        return dataclasses.replace(
            like, metric="mauve", value=score, stderr=None, data=self._source,
            data_sha256=self._digest, details={"real_texts": len(self._real)},
        )  # fmt: skip


def _library() -> Callable[..., Any]:
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise UserError("MAUVE needs the package mauve-text; install xdlm[eval]") from error
    compute: Callable[..., Any] = compute_mauve
    return compute
