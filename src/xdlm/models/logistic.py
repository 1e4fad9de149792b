"""A logistic law cut into levels: the prediction of a pixel by a place and a width.

The levels 0 .. K-1 lie evenly on [-1, 1], each in the middle of a bin of width 2/(K-1). With location m and
scale s, level e has the mass of the logistic law in its bin [a, b]; the first and the last level also carry
what lies beyond them, so that the levels sum to 1:

    p_e = sigmoid(v) - sigmoid(u) = sigmoid(v) sigmoid(-u) (1 - exp(u - v)),   u = (a - m)/s, v = (b - m)/s

The product form takes no difference of nearly equal numbers, and v - u is the same for all bins. Levels lie
in order on the line, so that a draw needs none of them: with r uniform it is the bin of m + s logit(r).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

#: A width of exp(-2) for a raw prediction of 0 is a reasonable one to start from (Austin et al. 2021).
SHIFT = 2.0
#: Narrower than the first, one level has all the mass; wider than the second, the two ends have it.
LOG_SCALES = (-7.0, 7.0)


def level_log_probs(location: Tensor, raw_scale: Tensor, levels: int) -> Tensor:
    """log p_e [..., K] for locations and raw widths [...]; the scale is exp(raw - 2)."""
    inverse_scale = torch.exp(SHIFT - raw_scale.clamp(*LOG_SCALES))[..., None]
    width = 2 / (levels - 1)
    edges = torch.linspace(
        -1 + width / 2, 1 - width / 2, levels - 1, device=location.device, dtype=location.dtype
    )
    at_edges = (edges - location[..., None]) * inverse_scale
    below, above = F.logsigmoid(at_edges), F.logsigmoid(-at_edges)
    inside = torch.log(-torch.expm1(-width * inverse_scale))
    middle = below[..., 1:] + above[..., :-1] + inside
    return torch.cat([below[..., :1], middle, above[..., -1:]], dim=-1)


def level_draws(
    location: Tensor, raw_scale: Tensor, uniform: Tensor, z: Tensor, levels: int
) -> tuple[Tensor, Tensor]:
    """For laws [R]: a level from each, the one that inverting the distribution function at `uniform` finds,
    and the probability (float64) of `z`, which is 0 for what is no level. In float64 throughout."""
    location, raw_scale = location.double(), raw_scale.double()
    inverse_scale = torch.exp(SHIFT - raw_scale.clamp(*LOG_SCALES))
    width = 2 / (levels - 1)
    place = location + torch.logit(uniform.double().clamp_min(0)) / inverse_scale
    level = ((place + 1) / width + 0.5).nan_to_num(0.0).clamp(0, levels - 1).long()
    upper = (width * (z.double() + 0.5) - 1 - location) * inverse_scale
    below = torch.where(z == levels - 1, 0.0, F.logsigmoid(upper))
    above = torch.where(z == 0, 0.0, F.logsigmoid(width * inverse_scale - upper))
    inside = torch.log(-torch.expm1(-width * inverse_scale))
    log_p = below + above + torch.where((z == 0) | (z == levels - 1), 0.0, inside)
    return level, torch.where(z < levels, log_p.exp(), 0.0)
