"""Statistics of a block of logits in plain torch: the reference for kernels, and the CPU's way."""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.ops.blocks import Block, Head
from xdlm.ops.rows import head_logits
from xdlm.structs import HeadRows, RowStats


class TorchBlock:
    """`BlockMath` in torch. The block is worked on in place, small enough for a CPU's cache."""

    elements = 1 << 22

    def prepare(self, head: Head) -> Head:
        return head

    def logits(self, hidden: Tensor, head: Head) -> Tensor:
        return head_logits(hidden, head.weight, head.bias, head.special)

    def stats(self, rows: HeadRows, head: Head, for_gradient: bool) -> Block:
        """Leaves the probabilities in place of the logits."""
        logits = self.logits(rows.hidden, head)
        logit_x = logits.gather(1, rows.x[:, None])[:, 0].double()
        logit_z = logits.gather(1, rows.z[:, None])[:, 0].double()
        top = logits.amax(-1, keepdim=True)
        probs = logits.sub_(top).exp_()
        total = probs.sum(-1, keepdim=True)
        probs /= total
        lse = (top.double() + total.log().double())[:, 0]
        if rows.log_c is None:
            stats = RowStats(lse, logit_x, logit_z, torch.zeros_like(total[:, 0]))
            return Block(stats, rows, probs, None)
        u = probs * _c(rows.log_c, probs)
        stats = RowStats(lse, logit_x, logit_z, torch.log1p(u).sum(-1))
        return Block(stats, rows, probs, u.div_(u + 1).sum(-1) if for_gradient else None)

    def gradient(self, block: Block, head: Head, d: RowStats) -> Tensor:
        probs, rows = block.state, block.rows
        d_lse, d_x, d_z, d_total = (field[:, None].to(probs.dtype) for field in d)
        if rows.log_c is None or block.spread is None:
            d_logits = probs.mul_(d_lse)
        else:
            # p (d_lse - d_S spread) + d_S c p/(1 + c p), with the two factors of p put together
            c = _c(rows.log_c, probs)
            factor = (d_total * c) / (probs * c).add_(1)
            d_logits = probs.mul_(factor.add_(d_lse - d_total * block.spread[:, None]))
        d_logits.scatter_add_(1, rows.x[:, None], d_x)
        # A special token's logit is the constant -inf: nothing flows back into it.
        ordinary = block.stats.logit_z[:, None].isfinite()
        d_logits.scatter_add_(1, rows.z[:, None], torch.where(ordinary, d_z, 0.0))
        return d_logits.to(rows.hidden.dtype)


def _c(log_c: Tensor, like: Tensor) -> Tensor:
    return log_c[:, None].to(like.dtype).exp()
