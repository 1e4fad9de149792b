"""Scalar forms of the divergences, from four numbers per row and the process's coefficients.

All arithmetic here is on [B, L] and in float64, since it costs nothing beside the vocabulary sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.structs import Coefs, RowStats, align


def marginal_kl(coefs: Coefs, stats: RowStats) -> Tensor:
    """`KL( f(x, .) || f(x~, .) )`, summed over the vocabulary in closed form.

    With b the noise on ordinary tokens and c = alpha/b,
    `KL = alpha log((alpha + b)/(alpha p_x + b)) + b [log1p(c) - S]`; for b = 0 cross-entropy.
    """
    log_p_x = _log_prob(stats.logit_x, stats)
    alpha, b = align(coefs.alpha, log_p_x), align(coefs.b_tok, log_p_x)
    # In the dtype of S, so that for a certain prediction the two cancel to the last bit.
    log_c = align(coefs.log_c, log_p_x).to(stats.S.dtype)
    log_alpha, log_b = alpha.log(), b.log()
    sharp = torch.logaddexp(log_alpha, log_b) - torch.logaddexp(log_alpha + log_p_x, log_b)
    spread = torch.log1p(log_c.exp()).double() - stats.S.double()
    return alpha * sharp + b * spread


def log_ratio(coefs: Coefs, stats: RowStats, x: Tensor, z: Tensor, where: Tensor) -> Tensor:
    """`log f(x, z) / f(x~, z)`, and 0 (with zero gradient) outside `where`."""
    log_p_z = _log_prob(stats.logit_z, stats)
    log_b = torch.where(where, coefs.b.at(z).log(), 0.0)
    truth = torch.where(where, coefs.of((z == x).double(), z), 1.0).log()
    model = torch.logaddexp(align(coefs.alpha, z).log() + log_p_z, log_b)
    return torch.where(where, truth - model, 0.0)


def rate_divergence(coefs: Coefs, stats: RowStats, x: Tensor, z: Tensor, where: Tensor) -> Tensor:
    """`KL( f(x,.) || f(x~,.) ) + rho - 1 - log rho`, with rho = f(x, z)/f(x~, z); both parts >= 0."""
    log_rho = log_ratio(coefs, stats, x, z, where)
    divergence = marginal_kl(coefs, stats) + (torch.expm1(log_rho) - log_rho)
    return torch.where(where, divergence, 0.0)


def rate_divergence_gradient(
    coefs: Coefs, stats: RowStats, x: Tensor, z: Tensor, where: Tensor
) -> RowStats:
    """Derivatives of `rate_divergence` by each statistic, in closed form.

    With `share(y) = alpha p_y/(alpha p_y + b(y))`:

        d/d log p_x = -alpha share(x)        d/d S = -b        d/d log p_z = (1 - rho) share(z)
    """
    rho = torch.exp(log_ratio(coefs, stats, x, z, where))
    alpha, b = align(coefs.alpha, z), align(coefs.b_tok, z)
    by_x = -alpha * _share(alpha, _log_prob(stats.logit_x, stats), b)
    by_z = (1 - rho) * _share(alpha, _log_prob(stats.logit_z, stats), coefs.b.at(z))
    by_x, by_z, by_sum = (torch.where(where, d, 0.0) for d in (by_x, by_z, -b.expand_as(by_x)))
    return RowStats(lse=-(by_x + by_z), logit_x=by_x, logit_z=by_z, S=by_sum)


def _share(alpha: Tensor, log_p: Tensor, b: Tensor) -> Tensor:
    """The part of f(x~, y) that comes from the prediction; 1 where there is no noise."""
    signal = alpha * log_p.exp()
    return torch.where(b > 0, signal / (signal + b), 1.0)


def _log_prob(logit: Tensor, stats: RowStats) -> Tensor:
    return logit - stats.lse
