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

from xdlm.ops.doubts import Doubts, Odds
from xdlm.ops.head import DrawingHead, RowDraws
from xdlm.structs import Coefs


def odds_at(at_t: Coefs, in_doubt: Tensor, accept: Tensor) -> Odds:
    """Of all positions [B, L]; a token in doubt is an ordinary one."""
    return Odds(in_doubt.flatten(), accept.flatten(), at_t.alpha, at_t.b.tok)


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
        self.hidden = weight.new_empty(0)
        #: log Z0, infinite where nothing is known.
        self.log_total = torch.full((n,), torch.inf, dtype=torch.float32, device=weight.device)

    @classmethod
    def of(cls, head: RowDraws, n: int) -> SeenRows | None:
        """None if the head is not linear, since then there is no bound on how its logits move."""
        return cls(head, n) if isinstance(head, DrawingHead) else None

    def doubtful(
        self, at: Tensor, hidden: Tensor, rows: Tensor, z: Tensor, odds: Odds
    ) -> tuple[Tensor, Doubts]:
        """Which of R positions `at` still need the head, with the logits of their tokens and their bars;
        `hidden[rows]` are their states now, `z` what there is at all positions. Those that are noise for
        sure need it."""
        if not self.hidden.numel():
            self.hidden = hidden.new_zeros(len(self.log_total), hidden.shape[-1])
        if self.head.fused:
            from xdlm.ops.fused_seen import Memory, fused_doubts

            before = Memory(self.hidden, self.log_total)
            return fused_doubts(
                hidden, rows, at, before, self._weight, self._bias, self._radius, z, odds
            )
        now, token, bar = hidden[rows].float(), z[at], odds.bar(at)
        logit = (now * self._weight[token].float()).sum(-1)
        if self._bias is not None:
            logit = logit + self._bias[token].float()
        moved = torch.linalg.vector_norm(now - self.hidden[at].float(), dim=-1)
        least = logit - self.log_total[at] - moved * self._radius
        return ~(least >= bar), Doubts(logit, bar)

    def remember(self, at: Tensor, hidden: Tensor, logit: Tensor, p_z: Tensor) -> None:
        """What the head found: `log Z = l_z - log p(z)`."""
        self.hidden[at] = hidden
        self.log_total[at] = logit - p_z.log().float()
