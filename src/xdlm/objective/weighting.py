"""How much each position counts in the training loss.

A weighting maps coefficients and tokens to a weight per position that multiplies
`KL + rho - 1 - log rho`. Only `elbo_weight` makes the loss a likelihood bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from xdlm.structs import Coefs, align

Weighting = Callable[[Coefs, Tensor, Tensor], Tensor]


def elbo_weight(coefs: Coefs, x: Tensor, z: Tensor) -> Tensor:
    """`rate_t(z)/f_t(x, z)`; 0 where z cannot change, or cannot have come from x."""
    rate = coefs.rate.at(z)
    reach = coefs.of((z == x).double(), z)
    # A rate that is NaN must stay NaN, so that it shows.
    nothing = (rate <= 0) | (reach <= 0)
    return torch.where(nothing, 0.0, rate / torch.where(reach <= 0, 1.0, reach))


@dataclass(frozen=True)
class ClippedWeight:
    """The ELBO's weight, at most `max_weight` (GIDD, von Ruette et al. 2025)."""

    max_weight: float = 2.0

    def __call__(self, coefs: Coefs, x: Tensor, z: Tensor) -> Tensor:
        return elbo_weight(coefs, x, z).clamp_max(self.max_weight)


@dataclass(frozen=True)
class DynamicWeight:
    """GIDD's dynamic weight: 2 on masks, 1 on wrong tokens, b/alpha on kept ones, at most
    `max_weight`.

    The GIDD paper writes the last as (B/N) e^(-lambda/2) with lambda the log signal-to-noise ratio;
    for its process with gamma = 1 that is b/alpha, which is meaningful for every process.
    """

    max_weight: float = 2.0

    def __call__(self, coefs: Coefs, x: Tensor, z: Tensor) -> Tensor:
        kept = align(coefs.b_tok / coefs.alpha, z)
        weight = torch.where(z == x, kept, 1.0)
        for token_id in coefs.b.special_ids:
            weight = torch.where(z == token_id, 2.0, weight)
        possible = elbo_weight(coefs, x, z) > 0
        return torch.where(possible, weight, 0.0).clamp_max(self.max_weight)


#: What a configuration may name.
WEIGHTINGS: dict[str, Weighting] = {
    "elbo": elbo_weight,
    "clipped": ClippedWeight(),
    "dynamic": DynamicWeight(),
}
