"""The output head as a sampler uses it: on gathered rows, with a draw at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.ops.blocks import Head, block_math, blocks
from xdlm.ops.categorical import draw_and_weigh
from xdlm.ops.dense import Logits, block_elements
from xdlm.ops.doubts import TakenRows
from xdlm.ops.rows import forbid, head_logits, resolve_impl

#: Changes logits, by temperature for example.
Reshape = Callable[[Tensor], Tensor]


class Guide(NamedTuple):
    """The same rows as the model sees them without a label, which guidance leads away from:

    log p = scale log p_with + (1 - scale) log p_without   (up to a constant)
    """

    hidden: Tensor
    scale: float


class DrawRows(NamedTuple):
    """Rows `hidden` [R, d] to draw from by numbers `uniform` [R], and tokens `z` [R] to weigh."""

    hidden: Tensor
    uniform: Tensor
    z: Tensor
    reshape: Reshape | None
    guide: Guide | None

    def part(self, rows: slice) -> DrawRows:
        guide = self.guide and self.guide._replace(hidden=self.guide.hidden[rows])
        return DrawRows(self.hidden[rows], self.uniform[rows], self.z[rows], self.reshape, guide)


class RowDraws(ABC):
    """Draws from the predictions of hidden rows, so many at a time that logits stay bounded."""

    def __init__(self, size: int, elements: int, special: tuple[int, ...]) -> None:
        self.size, self.elements, self.special = size, elements, special

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Of rows [R, d], whatever they are at special tokens."""

    def draw(
        self,
        hidden: Tensor,
        uniform: Tensor,
        z: Tensor,
        reshape: Reshape | None = None,
        guide: Guide | None = None,
    ) -> tuple[Tensor, Tensor]:
        """For rows `hidden` [R, d]: a token drawn from each prediction, and the probability of `z`. Where
        `uniform` is negative only the probability is wanted, and the token is arbitrary.

        A guide changes the logits first, then `reshape` does.
        """
        rows = DrawRows(hidden, uniform, z, reshape, guide)
        found = self._without_logits(rows)
        if found is not None:
            return found
        parts = [self._draw(rows.part(at)) for at in blocks(len(z), self.size, self.elements)]
        return _joined(parts, z)

    def _without_logits(self, rows: DrawRows) -> tuple[Tensor, Tensor] | None:
        """The same of all rows at once, by a head that has a shorter way than through logits."""
        return None

    def _draw(self, rows: DrawRows) -> tuple[Tensor, Tensor]:
        """The same of so few rows that their logits may be held."""
        logits = self.logits(rows.hidden)
        if rows.guide is not None:
            logits = guided(logits, self.logits(rows.guide.hidden), rows.guide.scale)
        logits = forbid(logits, self.special)
        if rows.reshape is not None:
            logits = rows.reshape(logits)
        return draw_and_weigh(logits, rows.uniform, rows.z)


class DrawingHead(RowDraws):
    """A linear head. It draws with kernels where they can run, logits are taken as they are, and states
    have the precision of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None, special: tuple[int, ...]) -> None:
        self.plain = Head(weight, bias, special, len(weight))
        self.fused = resolve_impl("auto", weight.device, weight.dtype) == "fused"
        self.math = block_math("fused" if self.fused else "chunked")
        self.padded = self.math.prepare(self.plain)
        super().__init__(self.plain.size, self.math.elements, special)

    def logits(self, hidden: Tensor) -> Tensor:
        return head_logits(hidden, self.plain.weight, self.plain.bias)

    def _draw(self, rows: DrawRows) -> tuple[Tensor, Tensor]:
        fused = self.fused and rows.hidden.dtype == self.padded.weight.dtype
        if not fused or rows.reshape is not None or rows.guide is not None:
            return super()._draw(rows)
        from xdlm.ops.fused import TritonBlock
        from xdlm.ops.fused_draw import fused_draw_and_weigh

        assert isinstance(self.math, TritonBlock)
        logits, sums = self.math.summed_logits(rows.hidden, self.padded)
        return fused_draw_and_weigh(logits, sums, self.padded, rows.uniform, rows.z)

    def can_count(self, hidden: Tensor) -> bool:
        """Whether `draw_counted` can be asked, of states like these."""
        if not self.fused:
            return False
        from xdlm.ops.fused_product import can_multiply

        return can_multiply(hidden, self.padded.weight)

    def draw_counted(self, taken: TakenRows, count: Tensor) -> tuple[Tensor, Tensor]:
        """As `draw` with kernels, of the first `count` rows, a number on the GPU which the host need not
        wait for. What is returned for other rows is arbitrary, and so are the token where `log p(z)`
        reaches the bar, and p(z) where z is noise for sure. Rows are taken so many at a time that their
        sums fill a quarter of a block of logits."""
        from xdlm.ops.fused_draw import fused_draw_counted
        from xdlm.ops.fused_product import PART, product_with_sums

        head, parts, n = self.padded, [], len(taken.at)
        for rows in blocks(n, 2 * -(-len(head.weight) // PART), self.elements // 4):
            part, left = taken.part(rows), count - rows.start if rows.start else count
            sums = product_with_sums(part.hidden, head, None, left)
            parts.append(
                fused_draw_counted(part.hidden, sums, head, part.uniform, part.doubts, left)
            )
        return _joined(parts, taken.at)


#: Draws from rows and the probabilities of `z`, as `RowDraws.draw` gives them; None where it cannot.
OwnDraws = Callable[[Tensor, Tensor, Tensor, Guide | None], tuple[Tensor, Tensor] | None]


class FunctionHead(RowDraws):
    """A head that is any function of hidden states. It draws by `own_draws` where it can, unless `reshape`
    needs logits; its law must then give special tokens no mass by itself."""

    def __init__(
        self,
        logits: Logits,
        size: int,
        special: tuple[int, ...],
        device: torch.device,
        own_draws: OwnDraws | None = None,
    ) -> None:
        super().__init__(size, block_elements(device), special)
        self._logits, self._own_draws = logits, own_draws

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden)

    def _without_logits(self, rows: DrawRows) -> tuple[Tensor, Tensor] | None:
        if rows.reshape is not None or self._own_draws is None:
            return None
        return self._own_draws(rows.hidden, rows.uniform, rows.z, rows.guide)


def _joined(parts: list[tuple[Tensor, Tensor]], z: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and probabilities of `z` of all rows, from those of blocks of them."""
    if not parts:
        return z, z.double()
    if len(parts) == 1:
        return parts[0]
    drawn, p_z = zip(*parts, strict=True)
    return torch.cat(drawn), torch.cat(p_z)


def guided(with_it: Tensor, without: Tensor, scale: float) -> Tensor:
    """Towards what a label or a prompt says: `scale log p_with + (1 - scale) log p_without`, from logits
    and up to a constant per row. A token that is impossible without it keeps its logit with it, and one
    that is impossible with it stays so at any scale but 0."""
    law = torch.where(without == -torch.inf, with_it, torch.lerp(without, with_it, scale))
    return torch.where(with_it == -torch.inf, -torch.inf if scale else without, law)
