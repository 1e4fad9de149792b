"""What confidence decoding asks of the model at a row: a token, how sure it is, and how likely the present
token is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.models import Denoiser
from xdlm.ops import categorical, forbid, head_logits
from xdlm.ops.blocks import blocks
from xdlm.ops.head import guided
from xdlm.sampling.filters import Filter


class Prediction(NamedTuple):
    """For each of R rows: a token drawn, the probabilities (float64) of that token and of the present
    one, and how sure the model is."""

    token: Tensor
    p_token: Tensor
    p_present: Tensor
    sure: Tensor


class _Law(NamedTuple):
    """Rows of unnormalised probabilities `weight` [R, V], the largest 1, and their sums [R] in float64, so
    that near certainties can be told apart down to 1e-16."""

    weight: Tensor
    total: Tensor

    def of(self, token: Tensor) -> Tensor:
        return self.weight.gather(1, token[:, None])[:, 0].double() / self.total

    def neg_entropy(self) -> Tensor:
        spread = torch.special.xlogy(self.weight, self.weight).sum(-1, dtype=torch.float64)
        return spread / self.total - self.total.log()

    def margin(self) -> Tensor:
        first, second = self.weight.topk(2, dim=-1).values.double().unbind(-1)
        return (first - second) / self.total


#: How sure a row is, from its law and the probability of the token drawn. "random" looks at neither: the
#: sampler puts chance in its place.
CONFIDENCES: dict[str, Callable[[_Law, Tensor], Tensor]] = {
    "token": lambda law, p_token: p_token,
    "entropy": lambda law, p_token: law.neg_entropy(),
    "margin": lambda law, p_token: law.margin(),
    "random": lambda law, p_token: p_token,
}


class PredictingHead:
    """The output head on gathered rows, so many at a time that logits stay bounded.

    Gumbel noise on logits is a draw from their softmax, and temperature scales it; the same draw by one
    53-bit number a row through `categorical` is exact in the tail and takes no noise of the size of the
    vocabulary.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        special: tuple[int, ...],
        reshape: Filter,
        *,
        guidance: float = 1.0,
        confidence: str = "token",
    ) -> None:
        if not denoiser.linear_head:
            raise UserError(
                "confidence decoding is for models with a linear head; use the ancestral sampler"
            )
        self.weight, self.bias = denoiser.head_weight, denoiser.head_bias
        self.special, self.reshape = special, reshape
        self.guidance, self.confidence = guidance, CONFIDENCES[confidence]
        self.elements = 1 << (24 if self.weight.is_cuda else 22)

    def __call__(
        self, hidden: Tensor, blind: Tensor | None, uniform: Tensor, present: Tensor
    ) -> Prediction:
        """`hidden` [R, d]; `blind` the same rows without the prompt, for guidance; `uniform` [R] to draw
        by; `present` [R] the tokens that stand there."""
        parts = [
            self._predict(
                self.law(hidden[rows], None if blind is None else blind[rows]),
                uniform[rows],
                present[rows],
            )
            for rows in blocks(len(hidden), len(self.weight), self.elements)
        ]
        return Prediction(*map(torch.cat, zip(*parts, strict=True)))

    def law(self, hidden: Tensor, blind: Tensor | None) -> Tensor:
        """Logits [R, V] before temperature and nucleus; under guidance
        `log p = (1 + gamma) log p_seen - gamma log p_blind` up to a constant, scale = 1 + gamma."""
        logits = head_logits(hidden, self.weight, self.bias)
        if blind is not None:
            without = head_logits(blind, self.weight, self.bias)
            logits = guided(logits, without, self.guidance)
        return forbid(logits, self.special)

    def _predict(self, logits: Tensor, uniform: Tensor, present: Tensor) -> Prediction:
        weight = (logits - logits.amax(-1, keepdim=True)).exp_()
        law = _Law(weight, weight.sum(-1, dtype=torch.float64))
        if self.reshape.temperature == 0:
            token = logits.argmax(-1)
        else:
            token = categorical(self.reshape(logits), uniform)
        p_token = law.of(token)
        return Prediction(token, p_token, law.of(present), self.confidence(law, p_token))
