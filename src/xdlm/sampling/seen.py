"""Telling tokens that cannot be noise without a sum over the vocabulary.

Whether a token z is noise depends on `p(z) = exp(l_z)/Z` (`step.is_noise`). It is not where

    log p(z) >= bar,   bar = log(b(z)/alpha) + log(1/accept - 1)

and only Z needs the whole vocabulary. If the position went through the head before, with hidden state h0
and sum Z0, no logit has grown since by more than `|w_v| |h - h0|`, hence

    log p(z) >= l_z - log Z0 - |h - h0| max_v |w_v|

Where this reaches the bar, the row need not go through the head again. The decision is the same, by the
same random number, so no text changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.ops.gather import TakenRows
from xdlm.ops.head import DrawingHead, RowDraws
from xdlm.structs import Coefs, align

#: Nats by which a logit may differ from the head's own, which adds its products in another order.
ROUNDING = 1e-2


def bar(at_t: Coefs, z: Tensor, accept: Tensor) -> Tensor:
    """[B, L] float32: the log-probability at which `accept` no longer takes a token for noise."""
    odds = at_t.b.at(z) / align(at_t.alpha, z) * (1 - accept) / accept
    return odds.log().float()


class SeenRows:
    """What the head found at each of `n` positions when it last looked there."""

    def __init__(self, head: DrawingHead, n: int) -> None:
        weight, special = head.plain.weight, head.special
        bias = head.plain.bias
        # A kernel expects the numbers of consecutive rows side by side, which views may not have.
        self.head, self._weight = head, weight.contiguous()
        self._bias = None if bias is None else bias.contiguous()
        work = torch.promote_types(weight.dtype, torch.float32)
        reach = torch.linalg.vector_norm(weight, dim=1, dtype=work).float()
        for token in special:
            reach[token : token + 1].fill_(0.0)  # unlike an assignment, this does not wait
        self._radius = reach.max()
        self._hidden = weight.new_empty(0)
        #: log Z0, infinite where nothing is known.
        self._log_total = torch.full((n,), torch.inf, dtype=torch.float32, device=weight.device)

    @classmethod
    def of(cls, head: RowDraws, n: int) -> SeenRows | None:
        """None if the head is not linear, since then there is no bound on how its logits move."""
        return cls(head, n) if isinstance(head, DrawingHead) else None

    def doubtful(
        self, at: Tensor, hidden: Tensor, rows: Tensor, z: Tensor, bar: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which of R positions `at` still need the head, and the logits of their tokens; `hidden[rows]` are
        their states now, `z` and `bar` what there is at all positions."""
        if not self._hidden.numel():
            self._hidden = hidden.new_zeros(len(self._log_total), hidden.shape[-1])
        if self.head.fused:
            from xdlm.ops.fused_seen import fused_doubts

            return fused_doubts(hidden, rows, at, self._hidden, self._log_total, self._weight,
                                self._bias, self._radius, z, bar, ROUNDING)  # fmt: skip
        now, token = hidden[rows].float(), z[at]
        logit = (now * self._weight[token].float()).sum(-1)
        if self._bias is not None:
            logit = logit + self._bias[token].float()
        moved = torch.linalg.vector_norm(now - self._hidden[at].float(), dim=-1)
        least = logit - self._log_total[at] - moved * self._radius - ROUNDING
        return ~(least >= bar[at]), logit

    def remember(self, at: Tensor, hidden: Tensor, logit: Tensor, p_z: Tensor) -> None:
        """What the head found: `log Z = l_z - log p(z)`."""
        self._hidden[at] = hidden
        self._log_total[at] = logit - p_z.log().float()

    def look_counted(
        self, taken: TakenRows, which: Tensor, logit: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take the first `count` rows, a number on the GPU that the host need not wait for, through the
        head and remember what it found: tokens, and p(z), infinite for the other rows. `logit[which]` are
        the logits of z."""
        from xdlm.ops.fused_seen import fused_remember

        drawn, p_z = self.head.draw_counted(taken.hidden, taken.uniform, taken.z, taken.bar, count)
        fused_remember(taken, which, logit, p_z, count, self._hidden, self._log_total)
        return drawn, p_z
