"""A hidden Markov model of real text, by expectation maximisation on batches.

For each batch the forward-backward algorithm gives how often each state is expected to begin a row, to
follow another and to say each token. What is expected of all text is a running mean of that,

    counts  <-  (1 - eta) counts + eta batch,        eta = (i + 2)^-0.6 in the i-th batch

(Liang and Klein 2009), and the law is the counts' shares. States that say much the same stay so for long:
they begin far apart in what they say, and alike in all else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.evaluation.markov_law import MarkovLaw, messages

#: Rows that are counted together, which there must be; and hidden states at the most.
FEWEST_ROWS = _BATCH = 64
MAX_HIDDEN = 4096
#: How fast what was counted before fades: between 0.5 (fast) and 1.
_FADING = 0.6
#: Deviation of the logarithms of what states say in the beginning.
_SCATTER = 3.0
#: Counts that every state has before it has seen any text, in shares of all text's own frequencies, and
#: what every token has there: none is impossible.
_PRIOR, _SOME = 1e-2, 0.5


class Counts(NamedTuple):
    """Expected numbers, as shares of rows (first) and of tokens: [K], [K, K] and [V, K]."""

    first: Tensor
    next: Tensor
    says: Tensor


def fit_markov(
    name: str,
    rows: Tensor,
    *,
    n_hidden: int,
    n_tokens: int,
    seed: int = 0,
    origin: dict[str, Any] | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> MarkovLaw:
    """Of `rows` [R, L] of tokens, read once. `on_batch` is told how many rows of how many were read."""
    check_states(n_hidden)
    if len(rows) < FEWEST_ROWS:
        raise UserError(
            f"there is too little text for a hidden Markov model: {len(rows):,} rows of "
            f"{rows.shape[1]} tokens, and at least {FEWEST_ROWS} are needed"
        )
    common = torch.bincount(rows.flatten(), minlength=n_tokens) + _SOME
    common = (common / common.sum())[:, None]
    generator = torch.Generator().manual_seed(seed)
    scatter = torch.randn(n_tokens, n_hidden, generator=generator).mul_(_SCATTER).exp_()
    begun = (torch.ones(n_hidden), torch.ones(n_hidden, n_hidden), common * scatter)
    counts = Counts(*(part / part.sum() for part in begun))
    for i, batch in enumerate(rows.split(_BATCH)):
        found = expected_counts(_law(name, counts, common), batch)
        eta = (i + 2) ** -_FADING
        counts = Counts(*(old.lerp(new, eta) for old, new in zip(counts, found, strict=True)))
        if on_batch is not None:
            on_batch(i * _BATCH + len(batch), len(rows))
    return replace(_law(name, counts, common), origin=origin or {})


def check_states(n: int) -> None:
    if not 2 <= n <= MAX_HIDDEN:
        raise UserError(f"a hidden Markov model has 2..{MAX_HIDDEN:,} hidden states, got {n}")


def _law(name: str, counts: Counts, common: Tensor) -> MarkovLaw:
    says = counts.says + _PRIOR * common / counts.says.shape[1]
    following = counts.next + _PRIOR / counts.next.numel()
    return MarkovLaw(
        name,
        counts.first / counts.first.sum(),
        following / following.sum(1, keepdim=True),
        (says / says.sum(0)).T.contiguous(),
    )


def expected_counts(law: MarkovLaw, rows: Tensor) -> Counts:
    """Of `rows` [B, L], as shares."""
    tokens = rows.T.flatten()
    seen = law.says.T[tokens]
    seen = (seen / seen.amax(-1, keepdim=True)).view(*rows.T.shape, -1)
    before, after = messages(law.first, law.next, seen)
    here, later = before * seen, after * seen
    state = here * after
    state /= state.sum(-1, keepdim=True)
    left, right = here[:-1].flatten(0, 1), later[1:].flatten(0, 1)
    right = right / ((left @ law.next) * right).sum(-1, keepdim=True)
    pairs = law.next * (left.T @ right)
    says = torch.zeros_like(law.says.T).index_add_(0, tokens, state.flatten(0, 1))
    return Counts(state[0].mean(0), pairs / pairs.sum(), says / rows.numel())
