"""What the output head says of some rows of a batch in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.ops.doubts import Odds
from xdlm.ops.gather import PickedRows
from xdlm.ops.head import Guide, Reshape, RowDraws
from xdlm.sampling.seen import SeenRows


class Looked(NamedTuple):
    """Of R rows that went through the head: their places among all positions, a token drawn for each, the
    probability of the present token and, if wanted, that of the drawn one."""

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
    """What to look at: `hidden` [R, d] holds all positions of the sequences `active`, in order."""

    head: RowDraws
    active: Tensor | slice
    hidden: Tensor
    unlabelled: Tensor | None
    """The same rows without a label, for guidance by this `scale`."""
    scale: float
    z: Tensor
    """[B, L], as they stand."""
    wanted: Tensor
    """[B, L], numbers to draw by; negative where no draw is wanted."""
    reshape: Reshape | None
    weigh_drawn: bool

    def through(self, order: Tensor, n: int) -> Looked:
        """Take rows through the head; those behind the first `n` only fill up a block."""
        at, hidden = self.places(order), self.hidden[order]
        wanted, z = self.wanted.flatten()[at], self.z.flatten()[at]
        guide = None if self.unlabelled is None else Guide(self.unlabelled[order], self.scale)
        drawn, p_z = self.head.draw(hidden, wanted, z, self.reshape, guide)
        p_drawn = None
        if self.weigh_drawn:
            no_draw = torch.full_like(wanted, -1.0)
            p_drawn = self.head.draw(hidden, no_draw, drawn, None, guide)[1][:n]
        return Looked(at[:n], drawn[:n], p_z[:n], p_drawn)

    def split(self, seen: SeenRows, order: Tensor, n: int, odds: Odds) -> RowsInDoubt:
        """Which of the first `n` of these rows need the head at all. The rows behind them are left out,
        since they may be among those that others look at."""
        order = order[:n]
        at = self.places(order)
        doubtful, doubts = seen.doubtful(at, self.hidden, order, self.z.flatten(), odds)
        return RowsInDoubt(self, seen, order, doubts.logit, PickedRows(doubtful))

    def places(self, order: Tensor) -> Tensor:
        """Of rows of `hidden`, among all positions."""
        if isinstance(self.active, slice):
            return order
        length = self.z.shape[1]
        return self.active[order // length] * length + order % length


class RowsInDoubt(NamedTuple):
    """Rows that may need the head: which of `look`'s they are, the logits of their tokens, and which of
    them do."""

    look: Look
    seen: SeenRows
    order: Tensor
    logit: Tensor
    left: PickedRows

    def resolve(self) -> Looked:
        """Take those that need it through the head, and remember what it found."""
        which, n = self.left.order()
        looked = self.look.through(self.order[which], n)
        which = which[:n]
        hidden = self.look.hidden[self.order[which]]
        self.seen.remember(looked.at, hidden, self.logit[which], looked.p_z)
        return looked
