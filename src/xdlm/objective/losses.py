"""The two losses: continuous time (`nelbo`) and one finite step (`step_kl`).

Both come in two forms: from logits, and from `RowStats` and `Coefs`, which is what training uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.noise import NoiseProcess
from xdlm.objective.divergence import (
    log_ratio,
    marginal_kl,
    rate_divergence,
    rate_divergence_gradient,
)
from xdlm.objective.weighting import Weighting, elbo_weight
from xdlm.ops import stats_of_logits
from xdlm.ops.device import has_triton
from xdlm.ops.rows import RowLoss
from xdlm.structs import Coefs, RowLosses, RowStats, align, batch_times, check_order

#: The first time whose coefficients and rates are all finite, with room to spare.
_FIRST = 1e-9
#: Nats beyond which e^r is not computed: float64 ends at 709.
_STEEP = 500.0


def nelbo(process: NoiseProcess, logits: Tensor, x: Tensor, z: Tensor, t: Tensor | float) -> Tensor:
    """The integrand of the continuous-time bound, nats per position, [B, L]:

        rate_t(z)/f_t(x, z) * [ KL( f_t(x,.) || f_t(x~,.) ) + rho - 1 - log rho ]

    Averaged over t ~ U(0, 1) and z ~ q_t(. | x), and with what `bound_ends` adds (little, unless alpha is
    far from 0 at t = 1), it bounds -log p(x). `logits` [B, L, N] may hold anything at special tokens; `t`
    is [B] or a number. Where the rate of z is 0 so is the loss: under masked noise, wherever z is no mask.
    """
    process.check_logits(logits, x, z)
    process.check_data(x)
    process.check_noisy(z)
    # GIDD's rates are infinite at both ends, where its loss has a limit: take it from beside them.
    coefs = process.coefs(batch_times(t, x).clamp(_FIRST, process.time_range[1]))
    stats = stats_of_logits(logits, x, z, row_log_c(process, coefs, x), mask_id=process.special_ids)
    return nelbo_of_stats(coefs, stats, x, z)


def nelbo_of_stats(
    coefs: Coefs, stats: RowStats, x: Tensor, z: Tensor, weighting: Weighting = elbo_weight
) -> Tensor:
    """`nelbo`, or the same divergence under another weighting, from row statistics."""
    weight = weighting(coefs, x, z)
    divergence = rate_divergence(coefs, stats, x, z, weight > 0)
    return (weight * divergence).to(stats.S.dtype)


def row_losses(coefs: Coefs, x: Tensor, z: Tensor, weight: Tensor) -> RowLoss:
    """For rows [R] under given weights: what turns their statistics into losses and derivatives."""
    if z.is_cuda and has_triton():
        from xdlm.objective.fused_rates import fused_row_losses

        return fused_row_losses(coefs, x, z, weight)

    def write(stats: RowStats, part: slice, out: RowLosses) -> None:
        at, some = coefs.index(part), RowStats(*(field[part] for field in stats))
        factor = weight[part]
        about = (at, some, x[part], z[part], factor > 0)
        out.losses[part] = factor * rate_divergence(*about)
        for place, derivative in zip(out.d, rate_divergence_gradient(*about), strict=True):
            place[part] = factor * derivative

    return write


def step_kl(
    process: NoiseProcess,
    logits: Tensor,
    x: Tensor,
    z: Tensor,
    s: Tensor | float,
    t: Tensor | float,
) -> Tensor:
    """`KL( q(z_s | z_t, x) || p(z_s | z_t) )` for s < t (Lemma 3), nats per position, [B, L].

    s = 0 gives the reconstruction term -log p(x | z_t).
    """
    s, t = batch_times(s, x), batch_times(t, x)
    check_order(s, t)
    at_s, at_t = process.coefs(s), process.coefs(t)
    return step_kl_between(process, at_s, at_t, logits, x, z)


def step_kl_between(
    process: NoiseProcess, at_s: Coefs, at_t: Coefs, logits: Tensor, x: Tensor, z: Tensor
) -> Tensor:
    """`step_kl` between given coefficients; `at_t` may be the terminal ones."""
    process.check_logits(logits, x, z)
    process.check_data(x)
    process.check_noisy(z)
    stats = stats_of_logits(logits, x, z, row_log_c(process, at_s, x), mask_id=process.special_ids)
    return step_kl_of_stats(process, at_s, at_t, stats, x, z)


def step_kl_of_stats(
    process: NoiseProcess, at_s: Coefs, at_t: Coefs, stats: RowStats, x: Tensor, z: Tensor
) -> Tensor:
    """The finite step from statistics taken at s alone.

    Let `u = b_ts(z)/f_t(x, z)` be the probability that z_t was redrawn on the way from s to t, and
    `r = log f_s(x, z)/f_s(x~, z)`. Since `f_t = alpha_ts f_s + b_ts`, Lemma 3 becomes

        KL = u KL( f_s(x,.) || f_s(x~,.) ) + [ log1p(u (e^r - 1)) - u r ]

    whose two parts are non-negative and tend to the terms of `nelbo` as s -> t. Where z was surely
    redrawn (u = 1, as for a wrong token at s = 0) the bracket is `log f_t(x~, z)/f_t(x, z)`.
    """
    redrawn = process.bridge(at_s, at_t).b.at(z)
    reach = at_t.of((z == x).double(), z)
    u = torch.where(redrawn > 0, redrawn / torch.where(reach > 0, reach, 1.0), 0.0)
    may_have_stayed = (at_s.of((z == x).double(), z) > 0) & (align(at_t.alpha, z) > 0)
    r = log_ratio(at_s, stats, x, z, (u > 0) & may_have_stayed)
    surely_redrawn = -log_ratio(at_t, stats, x, z, (u > 0) & ~may_have_stayed)
    # Beyond, the logarithm is a straight line of slope 1.
    near, beyond = r.clamp_max(_STEEP), (r - _STEEP).clamp_min(0)
    line = torch.where(u < 1, (1 - u) * beyond, 0.0)
    bracket = torch.log1p(u * torch.expm1(near)) - u * near + line + surely_redrawn
    kl = torch.where(u > 0, u * marginal_kl(at_s, stats), 0.0) + bracket
    return kl.to(stats.S.dtype)


def row_log_c(process: NoiseProcess, coefs: Coefs, x: Tensor) -> Tensor | None:
    """log c for every position, or None where the process never needs the vocabulary sum."""
    if not process.has_uniform_noise:
        return None
    return align(coefs.log_c, x).expand(x.shape)
