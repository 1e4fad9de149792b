"""What is known of rows whose tokens may be noise, and of others that a step draws for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Nats by which bars are raised: a logit may differ from the head's own, which adds its products in another
#: order, and bars are rounded.
SLACK = 1e-2


class Odds(NamedTuple):
    """What decides whether tokens z are noise, once p(z) is known: where `in_doubt` [P] holds, z is noise
    if

        accept (alpha p(z) + b) < b,

    and elsewhere for sure. `accept` [P] are numbers in [0, 1); `alpha` and `b` [B] belong to the B
    sequences that the P positions make up."""

    in_doubt: Tensor
    accept: Tensor
    alpha: Tensor
    b: Tensor

    @property
    def length(self) -> int:
        return len(self.accept) // len(self.alpha)

    def bar(self, at: Tensor) -> Tensor:
        """For R positions, in float32: a log-probability of z from which on it is no noise,

        log(b/alpha) + log(1/accept - 1) + SLACK,

        and an infinite one where it is noise for sure."""
        accept, row = self.accept[at], at // self.length
        odds = self.b[row] / self.alpha[row] * (1 - accept) / accept
        return torch.where(self.in_doubt[at], odds.log().float() + SLACK, torch.inf)


class Doubts(NamedTuple):
    """Of R rows: the logits of their tokens, and their bars. Where a token is noise for sure, -inf and an
    infinite bar: it counts as impossible, and nothing keeps the row from being drawn for."""

    logit: Tensor
    bar: Tensor


class TakenRows(NamedTuple):
    """Gathered rows: their states, their places among all positions, the numbers to draw by there (negative
    where no draw is wanted), and doubts, if there are any."""

    hidden: Tensor
    at: Tensor
    uniform: Tensor
    doubts: Doubts | None

    def part(self, rows: slice) -> TakenRows:
        doubts = self.doubts and Doubts(*(value[rows] for value in self.doubts))
        return TakenRows(self.hidden[rows], self.at[rows], self.uniform[rows], doubts)
