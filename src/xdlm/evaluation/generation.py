"""How good generated texts are: perplexity under a judge, entropy, and how much repeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xdlm.errors import UserError
from xdlm.evaluation.judges import Judge, Score, score_all

N_GRAMS = (1, 2, 3)


@dataclass(frozen=True)
class Mean:
    value: float
    stderr: float


@dataclass(frozen=True)
class Quality:
    """Of a set of texts. No text is left out; perplexity counts every token of the judge once."""

    perplexity: Mean
    entropy: Mean
    """Nats of the tokens' own frequencies within each text, averaged over texts. Perplexity alone can be
    had by repeating oneself; this shows it."""
    distinct: dict[int, float]
    """Share of n-grams, over all texts, that occur for the first time."""
    n: int
    judge_tokens: int


def quality(
    texts: Sequence[str],
    tokens: Sequence[NDArray[np.int64]],
    judge: Judge,
    on_text: Callable[[int, int], None] | None = None,
) -> Quality:
    """`tokens` are the texts in the model's own tokens."""
    if not texts:
        raise UserError("there is no text to judge")
    scores = score_all(judge, texts, on_text)
    return Quality(
        perplexity=_perplexity(scores),
        entropy=mean([token_entropy(ids) for ids in tokens]),
        distinct={n: _distinct(tokens, n) for n in N_GRAMS},
        n=len(texts),
        judge_tokens=sum(score.tokens for score in scores),
    )


def token_entropy(tokens: NDArray[np.int64]) -> float:
    """Entropy of the token frequencies of one text, in nats."""
    _, counts = np.unique(tokens, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _perplexity(scores: Sequence[Score]) -> Mean:
    """exp of all nats over all tokens; the error is that of a ratio of sums over texts."""
    nats = np.array([score.nats for score in scores])
    counts = np.array([score.tokens for score in scores], dtype=float)
    if counts.sum() == 0:
        raise UserError("the texts are too short to judge: no token has one before it")
    mean = nats.sum() / counts.sum()
    value = math.exp(min(mean, 700.0))
    n = len(scores)
    if n < 2:
        return Mean(value, math.nan)
    spread = math.sqrt(((nats - mean * counts) ** 2).sum() * n / (n - 1)) / counts.sum()
    return Mean(value, value * spread)


def mean(values: Sequence[float]) -> Mean:
    """With its standard error, which one value does not tell."""
    n = len(values)
    stderr = float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Mean(float(np.mean(values)), stderr)


def _distinct(tokens: Sequence[NDArray[np.int64]], n: int) -> float:
    grams = [tuple(ids[i : i + n].tolist()) for ids in tokens for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan
