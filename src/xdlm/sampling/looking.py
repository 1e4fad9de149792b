"""What the output head says of some rows of a batch in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.ops.gather import PickedRows, ordered_rows
from xdlm.ops.head import Guide, Reshape, RowDraws
from xdlm.sampling.seen import ROUNDING, SeenRows


class Looked(NamedTuple):
    """Of R rows: their places among all positions, a token drawn for each, the probability of the present
    token (infinite where none was needed) and, if wanted, that of the drawn one; and how many rows went
    through the head."""

    at: Tensor
    drawn: Tensor
    p_z: Tensor
    p_drawn: Tensor | None
    n: int | Tensor

    def and_also(self, other: Looked) -> Looked:
        """The rows of both."""
        p_drawn = None
        if self.p_drawn is not None and other.p_drawn is not None:
            p_drawn = torch.cat([self.p_drawn, other.p_drawn])
        at, drawn, p_z = (torch.cat(parts) for parts in zip(self[:3], other[:3], strict=True))
        return Looked(at, drawn, p_z, p_drawn, self.n + other.n)


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
        return Looked(at[:n], drawn[:n], p_z[:n], p_drawn, n)

    def doubts(self, seen: SeenRows, order: Tensor, n: int, bar: Tensor) -> Doubts:
        """Which of the first `n` of these rows need the head at all; `bar` [B, L] as `seen.bar`. The rows
        behind them are left out, since they may be among those that others look at."""
        order = order[:n]
        at, bar = self.places(order), bar.flatten()
        doubtful, logit = seen.doubtful(at, self.hidden, order, self.z.flatten(), bar)
        counts = seen.head.can_count(self.hidden) and not self.weigh_drawn
        left = None if counts else PickedRows(doubtful)
        return Doubts(self, seen, order, at, bar, logit, doubtful, left)

    def places(self, order: Tensor) -> Tensor:
        """Of rows of `hidden`, among all positions."""
        if isinstance(self.active, slice):
            return order
        length = self.z.shape[1]
        return self.active[order // length] * length + order % length


class Doubts(NamedTuple):
    """Rows that may need the head: which of `look`'s they are, their places, the logits of their tokens,
    and whether each does; `bar` is that of all positions. `left` says which do, unless a GPU counts them
    by itself."""

    look: Look
    seen: SeenRows
    order: Tensor
    at: Tensor
    bar: Tensor
    logit: Tensor
    doubtful: Tensor
    left: PickedRows | None

    def resolve(self) -> Looked:
        """Take those that need it through the head, and remember what it found."""
        if self.left is None:
            return self._without_waiting()
        which, n = self.left.order()
        looked = self.look.through(self.order[which], n)
        which = which[:n]
        hidden = self.look.hidden[self.order[which]]
        self.seen.remember(looked.at, hidden, self.logit[which], looked.p_z)
        return looked

    def _without_waiting(self) -> Looked:
        """The same on a GPU that counts the rows by itself: it would stand still while the host learns how
        many there are and launches what follows."""
        from xdlm.ops.fused_seen import fused_take

        look = self.look
        which, n = ordered_rows(self.doubtful)
        wanted, z = look.wanted.flatten(), look.z.flatten()
        taken = fused_take(
            look.hidden, self.order, self.at, which, n, wanted, z, self.bar, ROUNDING
        )
        drawn, p_z = self.seen.look_counted(taken, which, self.logit, n)
        return Looked(taken.at, drawn, p_z, None, n)
