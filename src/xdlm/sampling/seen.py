"""Tokens that are surely no noise, told without a sum over the vocabulary.

Whether a token z is noise hangs on `p(z) = exp(l_z)/Z` (`step.is_noise`). It is none where

    log p(z) >= bar,   bar = log(b(z)/alpha) + log(1/accept - 1)

and only Z takes the whole vocabulary. If the position went through the head before, in a hidden state h0
and with a sum Z0, then no logit has grown since by more than `|w_v| |h - h0|`, hence

    log p(z) >= l_z - log Z0 - |h - h0| max_v |w_v|

Where this reaches the bar, the row need not go through the head again. That is the same decision by the
same random number, so it changes no text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.ops.gather import TakenRows
from xdlm.ops.head import DrawingHead, RowDraws
from xdlm.structs import Coefs, align

#: Nats by which a sum of products may differ from the head's own, which adds in another order.
ROUNDING = 1e-2


def bar(at_t: Coefs, z: Tensor, accept: Tensor) -> Tensor:
    """[B, L] float32: the log-probability from which on a token is no noise, by this random number."""
    odds = at_t.b.at(z) / align(at_t.alpha, z) * (1 - accept) / accept
    return odds.log().float()


class SeenRows:
    """What the head found at each of `n` positions when it last looked there."""

    def __init__(self, head: DrawingHead, n: int) -> None:
        weight, special = head.plain.weight, head.special
        bias = head.plain.bias
        # A kernel steps through these one number at a time; views may not.
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
        """None if the head is not linear: then nothing is known of how its logits move."""
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
        """The first `count` rows through the head, a number on the GPU that nobody waits for: tokens, and
        p(z), infinite for the other rows. It is remembered; `logit[which]` are the logits of z."""
        from xdlm.ops.fused_seen import fused_remember

        drawn, p_z = self.head.draw_counted(taken.hidden, taken.uniform, taken.z, taken.bar, count)
        fused_remember(taken, which, logit, p_z, count, self._hidden, self._log_total)
        return drawn, p_z
