"""What the output head says of some rows of a batch in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.ops.gather import PickedRows
from xdlm.ops.head import Guide, Reshape, RowDraws
from xdlm.sampling.seen import SeenRows


class Looked(NamedTuple):
    """Of R rows: their places among all positions, a token drawn for each, the probability of the one that
    stands there and, if it was asked for, of the one drawn."""

    at: Tensor
    drawn: Tensor
    p_z: Tensor
    p_drawn: Tensor | None

    def and_also(self, other: Looked) -> Looked:
        """The rows of both."""
        p_drawn = None
        if self.p_drawn is not None and other.p_drawn is not None:
            p_drawn = torch.cat([self.p_drawn, other.p_drawn])
        at, drawn, p_z = (torch.cat(parts) for parts in zip(self[:3], other[:3], strict=True))
        return Looked(at, drawn, p_z, p_drawn)


@dataclass(frozen=True)
class Look:
    """Where to look: `hidden` [R, d] has the rows of the sequences `active`, one after the other."""

    head: RowDraws
    active: Tensor | slice
    hidden: Tensor
    unlabelled: Tensor | None
    """The same rows without a label, for guidance by this `scale`."""
    scale: float
    z: Tensor
    """[B, L], as they stand."""
    wanted: Tensor
    """[B, L], to draw by; where it is negative nothing is drawn."""
    reshape: Reshape | None
    weigh_drawn: bool

    def through(self, order: Tensor, n: int) -> Looked:
        """Rows through the head; those behind the first `n` only fill up."""
        at, hidden = self._places(order), self.hidden[order]
        wanted, z = self.wanted.flatten()[at], self.z.flatten()[at]
        guide = None if self.unlabelled is None else Guide(self.unlabelled[order], self.scale)
        drawn, p_z = self.head.draw(hidden, wanted, z, self.reshape, guide)
        p_drawn = None
        if self.weigh_drawn:
            no_draw = torch.full_like(wanted, -1.0)
            p_drawn = self.head.draw(hidden, no_draw, drawn, None, guide)[1][:n]
        return Looked(at[:n], drawn[:n], p_z[:n], p_drawn)

    def doubts(self, seen: SeenRows, order: Tensor, n: int, bar: Tensor) -> Doubts:
        """Which of the first `n` of these rows need the head at all; `bar` [B, L] as `seen.bar`."""
        at = self._places(order)
        z, bar = self.z.flatten()[at], bar.flatten()[at]
        doubtful, logit = seen.doubtful(at, self.hidden, order, z, bar)
        doubtful[n:] = False
        return Doubts(self, seen, order, logit, PickedRows(doubtful))

    def _places(self, order: Tensor) -> Tensor:
        if isinstance(self.active, slice):
            return order
        length = self.z.shape[1]
        return self.active[order // length] * length + order % length


class Doubts(NamedTuple):
    """Rows that are left to the head; how many travels to the host while other work runs."""

    look: Look
    seen: SeenRows
    order: Tensor
    logit: Tensor
    left: PickedRows

    def resolve(self) -> Looked:
        """Through the head, which is remembered."""
        which, n = self.left.order()
        looked = self.look.through(self.order[which], n)
        which = which[:n]
        self.seen.remember(
            looked.at, self.look.hidden[self.order[which]], self.logit[which], looked.p_z
        )
        return looked
