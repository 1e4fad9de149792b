"""The output head as a sampler uses it: on gathered rows, with a draw at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from xdlm.ops.blocks import Head, block_math, blocks
from xdlm.ops.categorical import draw_and_weigh
from xdlm.ops.rows import head_logits, resolve_impl


class DrawingHead:
    """Draws from the predictions of hidden rows, so many at a time that logits stay bounded."""

    def __init__(self, weight: Tensor, bias: Tensor | None, special: tuple[int, ...]) -> None:
        self.plain = Head(weight, bias, special, len(weight))
        self.fused = resolve_impl("auto", weight.device, weight.dtype) == "fused"
        self.math = block_math("fused" if self.fused else "chunked")
        self.padded = self.math.prepare(self.plain)

    def draw(
        self,
        hidden: Tensor,
        uniform: Tensor,
        z: Tensor,
        reshape: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """For rows `hidden` [R, d]: a token from each prediction, and the probability of `z`. Where
        `uniform` is negative only the latter is asked for, and the token may be anything.

        `reshape` (temperature and the like) is applied to the logits first.
        """
        parts = [
            self._draw(hidden[rows], uniform[rows], z[rows], reshape)
            for rows in blocks(len(hidden), self.plain.size, self.math.elements)
        ]
        if not parts:
            return z, z.double()
        drawn, p_z = zip(*parts, strict=True)
        return torch.cat(drawn), torch.cat(p_z)

    def _draw(
        self,
        hidden: Tensor,
        uniform: Tensor,
        z: Tensor,
        reshape: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        if self.fused and reshape is None:
            from xdlm.ops.fused_draw import fused_draw_and_weigh

            logits = self.math.logits(hidden, self.padded)
            return fused_draw_and_weigh(logits, self.padded, uniform, z)
        head = self.plain
        logits = head_logits(hidden, head.weight, head.bias, head.special)
        return draw_and_weigh(logits if reshape is None else reshape(logits), uniform, z)
