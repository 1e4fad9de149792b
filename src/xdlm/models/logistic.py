"""A logistic law cut into levels: the prediction of a pixel by a place and a width.

The levels 0 .. K-1 lie evenly on [-1, 1], each in the middle of a bin of width 2/(K-1). With location m and
scale s, level e has the mass of the logistic law in its bin [a, b]; the first and the last level also carry
what lies beyond them, so that the levels sum to 1:

    p_e = sigmoid(v) - sigmoid(u) = sigmoid(v) sigmoid(-u) (1 - exp(u - v)),   u = (a - m)/s, v = (b - m)/s

The product form takes no difference of nearly equal numbers, and v - u is the same for all bins. Levels lie
in order on the line, so that a draw needs none of them: with r uniform it is the bin of m + s logit(r).

Of the four statistics of a row only the sum over levels looks at all of them. With i = 1/s, the width w of
a bin, q_e = c p_e/(1 + c p_e), and the masses below_j and above_j the edge between levels j and j + 1,

    S          = sum_e log1p(c p_e)
    D_j        = above_j q_j - below_j q_(j+1)
    dS/dm      = -i sum_j D_j
    dS/dlog i  = sum_j (edge_j - m) i D_j + w i/(exp(w i) - 1) sum_(0 < e < K-1) q_e.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from xdlm.ops.blocks import blocks
from xdlm.structs import RowStats

#: A width of exp(-2) for a raw prediction of 0 is a reasonable one to start from (Austin et al. 2021).
SHIFT = 2.0
#: Narrower than the first, one level has all the mass; wider than the second, the two ends have it.
LOG_SCALES = (-7.0, 7.0)
#: Numbers in a block of levels: a few such blocks stay in a core's own cache, or keep a GPU busy.
_CPU_BLOCK, _GPU_BLOCK = 1 << 18, 1 << 24


def level_log_probs(location: Tensor, raw_scale: Tensor, levels: int) -> Tensor:
    """log p_e [..., K] for locations and raw widths [...]; the scale is exp(raw - 2)."""
    inverse_scale = _inverse_scale(raw_scale)[..., None]
    at_edges = (_edges(location, levels) - location[..., None]) * inverse_scale
    below, above = F.logsigmoid(at_edges), F.logsigmoid(-at_edges)
    middle = below[..., 1:] + above[..., :-1] + _inside(inverse_scale, levels).log()
    return torch.cat([below[..., :1], middle, above[..., -1:]], dim=-1)


def level_log_prob(location: Tensor, raw_scale: Tensor, level: Tensor, levels: int) -> Tensor:
    """log p_e at one level e for each law; -inf for what is no level."""
    inverse_scale, width = _inverse_scale(raw_scale), 2 / (levels - 1)
    upper = (width * (level.to(location.dtype) + 0.5) - 1 - location) * inverse_scale
    first, last = level == 0, level == levels - 1
    below = torch.where(last, 0.0, F.logsigmoid(upper))
    above = torch.where(first, 0.0, F.logsigmoid(width * inverse_scale - upper))
    inside = torch.where(first | last, 0.0, _inside(inverse_scale, levels).log())
    return torch.where(level < levels, below + above + inside, -torch.inf)


def level_stats(
    location: Tensor, raw_scale: Tensor, x: Tensor, z: Tensor, log_c: Tensor | None, levels: int
) -> RowStats:
    """`row_stats` of laws [R], with gradients; what is no level, a mask, has no mass. All levels together
    have mass 1, so that `lse` is 0, and without `log_c` no level is looked at but x and z."""
    logit_x, logit_z = (level_log_prob(location, raw_scale, e, levels) for e in (x, z))
    if log_c is None:
        total = torch.zeros_like(location)
    else:
        total = _SumOverLevels.apply(location, raw_scale, _c(log_c.to(location.dtype)), levels)
    return RowStats(torch.zeros_like(logit_x).double(), logit_x.double(), logit_z.double(), total)


def level_draws(
    location: Tensor, raw_scale: Tensor, uniform: Tensor, z: Tensor, levels: int
) -> tuple[Tensor, Tensor]:
    """For laws [R]: a level from each, the one that inverting the distribution function at `uniform` finds,
    and the probability (float64) of `z`, which is 0 for what is no level. In float64 throughout."""
    location, raw_scale = location.double(), raw_scale.double()
    place = location + torch.logit(uniform.double().clamp_min(0)) / _inverse_scale(raw_scale)
    level = (place + 1) * ((levels - 1) / 2) + 0.5
    level = level.nan_to_num(0.0).clamp(0, levels - 1).long()
    return level, level_log_prob(location, raw_scale, z, levels).exp()


class _SumOverLevels(torch.autograd.Function):
    """S for places, raw widths and c [R]. Its slopes are found on the way, while the levels are at hand.
    Second derivatives need `impl="eager"`."""

    @staticmethod
    def forward(ctx: Any, location: Tensor, raw_scale: Tensor, c: Tensor, levels: int) -> Tensor:
        inverse_scale, edges = _inverse_scale(raw_scale), _edges(location, levels)
        total, slopes = (
            torch.empty_like(location),
            ctx.needs_input_grad[0] or ctx.needs_input_grad[1],
        )
        by_location, by_width = (torch.empty_like(location) for _ in range(2))
        most = _GPU_BLOCK if location.is_cuda else _CPU_BLOCK
        for part in blocks(len(location), levels, most):
            found = _sum_over_levels(
                location[part], inverse_scale[part], c[part], edges, slopes=slopes
            )
            total[part] = found.total
            if found.slopes is not None:
                by_location[part], by_width[part] = found.slopes
        low, high = LOG_SCALES
        by_width.masked_fill_((raw_scale < low) | (raw_scale > high), 0.0)
        ctx.save_for_backward(by_location, by_width)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        by_location, by_width = ctx.saved_tensors
        return upstream * by_location, upstream * by_width, None, None


class _Sum(NamedTuple):
    total: Tensor
    slopes: tuple[Tensor, Tensor] | None
    """By location and by raw width."""


def _sum_over_levels(m: Tensor, i: Tensor, c: Tensor, edges: Tensor, *, slopes: bool) -> _Sum:
    """Of a block of laws; levels are worked on in place."""
    levels, i = len(edges) + 1, i[:, None]
    at_edges = (edges - m[:, None]).mul_(i)
    below, above = at_edges.sigmoid(), at_edges.neg().sigmoid_()
    mass = at_edges.new_empty(len(m), levels)
    mass[:, 0], mass[:, -1] = below[:, 0], above[:, -1]
    mass[:, 1:-1] = (below[:, 1:] * above[:, :-1]).mul_(_inside(i, levels))
    mass.mul_(c[:, None])
    total = mass.log1p().sum(-1)
    if not slopes:
        return _Sum(total, None)
    q = mass.div_(mass + 1)
    by_edge = above.mul_(q[:, :-1]).sub_(below.mul_(q[:, 1:]))
    wide = 2 / (levels - 1) * i
    by_inverse = at_edges.mul_(by_edge).sum(-1)
    by_inverse += (wide / torch.expm1(wide))[:, 0] * q[:, 1:-1].sum(-1)
    return _Sum(total, (-i[:, 0] * by_edge.sum(-1), -by_inverse))


def _c(log_c: Tensor) -> Tensor:
    """At most 1e18, as in kernels: noise of less than 1e-18 counts for that much."""
    return log_c.exp().clamp_max(1e18)


def _inverse_scale(raw_scale: Tensor) -> Tensor:
    return torch.exp(SHIFT - raw_scale.clamp(*LOG_SCALES))


def _edges(like: Tensor, levels: int) -> Tensor:
    """Between each level and the next, [K - 1]."""
    end = 1 - 1 / (levels - 1)
    return torch.linspace(-end, end, levels - 1, device=like.device, dtype=like.dtype)


def _inside(inverse_scale: Tensor, levels: int) -> Tensor:
    """1 - exp(u - v)"""
    return -torch.expm1(-2 / (levels - 1) * inverse_scale)
