"""Statistics of a block of logits in plain torch: the reference for kernels, and the CPU's way."""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.ops.blocks import Found, Head, LogitGradient
from xdlm.ops.rows import head_logits
from xdlm.structs import HeadRows, RowStats

#: States from so wide on are multiplied in blocks of twice the size: a product of few rows reads the whole
#: weight for little.
_WIDE = 384


class TorchBlock:
    """`BlockMath` in torch. The block is worked on in place, small enough for a CPU's cache."""

    elements = gradient_elements = 1 << 22
    least_rows = 1
    kept_elements = 1 << 26

    def prepare(self, head: Head) -> Head:
        own, times = type(self), 2 if head.weight.shape[1] >= _WIDE else 1
        self.elements, self.gradient_elements = times * own.elements, times * own.gradient_elements
        return head

    def stats(self, rows: HeadRows, part: slice, head: Head, out: Found) -> Tensor:
        """Leaves the probabilities in place of the logits."""
        logits = head_logits(rows.hidden[part], head.weight, head.bias, head.special)
        out.stats.logit_x[part] = logits.gather(1, rows.x[part, None])[:, 0].double()
        out.stats.logit_z[part] = logits.gather(1, rows.z[part, None])[:, 0].double()
        top = logits.amax(-1, keepdim=True)
        probs = logits.sub_(top).exp_()
        total = probs.sum(-1, keepdim=True)
        probs /= total
        out.stats.lse[part] = (top.double() + total.log().double())[:, 0]
        if rows.log_c is not None:
            u = probs * _c(rows.log_c[part], probs)
            if out.spread is not None:
                more = u + 1
                out.spread[part] = torch.div(u, more, out=more).sum(-1)
            out.stats.S[part] = u.log1p_().sum(-1)
        return probs

    def gradient(
        self, rows: HeadRows, part: slice, state: Tensor, found: Found, d: RowStats
    ) -> LogitGradient:
        probs = state
        d_lse, d_x, d_z, d_total = (field[part, None].to(probs.dtype) for field in d)
        if rows.log_c is None or found.spread is None:
            d_logits = probs.mul_(d_lse)
        else:
            # p (d_lse - d_S spread) + d_S c p/(1 + c p), with the two factors of p put together
            c = _c(rows.log_c[part], probs)
            factor = (probs * c).add_(1)
            torch.div(d_total * c, factor, out=factor)
            d_logits = probs.mul_(factor.add_(d_lse - d_total * found.spread[part, None]))
        d_logits.scatter_add_(1, rows.x[part, None], d_x)
        # A special token's logit is the constant -inf: nothing flows back into it.
        ordinary = found.stats.logit_z[part, None].isfinite()
        d_logits.scatter_add_(1, rows.z[part, None], torch.where(ordinary, d_z, 0.0))
        d_bias = None if rows.bias is None else d_logits.sum(0)
        return LogitGradient(d_logits.to(rows.hidden.dtype), d_bias)


def _c(log_c: Tensor, like: Tensor) -> Tensor:
    return log_c[:, None].to(like.dtype).exp()
