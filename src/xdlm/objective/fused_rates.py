"""Losses of rows and their derivatives in one Triton kernel instead of some sixty small steps."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from xdlm.ops.rows import RowLoss
from xdlm.structs import Coefs, RowLosses, RowStats, align

_BLOCK = 128


def fused_row_losses(coefs: Coefs, x: Tensor, z: Tensor, weight: Tensor) -> RowLoss:
    """As `losses.row_losses`, for rows on a GPU."""
    per_row = [
        field.expand_as(z).contiguous()
        for field in (align(coefs.alpha, z), align(coefs.b_tok, z), coefs.b.at(z), weight, x, z)
    ]

    def write(stats: RowStats, part: slice, out: RowLosses) -> None:
        n = part.stop - part.start
        _nelbo_kernel[(triton.cdiv(n, _BLOCK),)](
            *stats, *per_row, out.losses, *out.d, part.start, part.stop, BLOCK=_BLOCK
        )

    return write


@triton.jit(do_not_specialize=["first", "end"])
def _nelbo_kernel(
    lse_ptr, logit_x_ptr, logit_z_ptr, total_ptr, alpha_ptr, b_ptr, b_z_ptr, weight_ptr, x_ptr,
    z_ptr, loss_ptr, d_lse_ptr, d_x_ptr, d_z_ptr, d_total_ptr, first, end, BLOCK: tl.constexpr,
):  # fmt: skip
    """All in float64; the formulas are those of `divergence.py`, written without log1p and expm1."""
    row = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < end
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
    log_p_x = tl.load(logit_x_ptr + row, mask=inside, other=0.0) - lse
    p_x = tl.exp(log_p_x)
    p_z = tl.exp(tl.load(logit_z_ptr + row, mask=inside, other=0.0) - lse)
    total = tl.load(total_ptr + row, mask=inside, other=0.0).to(tl.float64)
    alpha = tl.load(alpha_ptr + row, mask=inside, other=1.0)
    b = tl.load(b_ptr + row, mask=inside, other=1.0)
    b_z = tl.load(b_z_ptr + row, mask=inside, other=1.0)
    weight = tl.load(weight_ptr + row, mask=inside, other=0.0)
    kept = tl.load(x_ptr + row, mask=inside, other=0) == tl.load(z_ptr + row, mask=inside, other=0)

    noisy = b > 0
    safe_b = tl.where(noisy, b, 1.0)
    sharp = tl.log((alpha + b) / tl.where(noisy, alpha * p_x + b, 1.0))
    sharp = tl.where(noisy, sharp, -log_p_x)
    # In the precision of S, so that for a certain prediction the two cancel.
    c = (alpha / safe_b).to(tl.float32).to(tl.float64)
    certain = tl.log(1 + c).to(tl.float32).to(tl.float64)
    spread = tl.where(noisy, b * (certain - total), 0.0)
    # d = rho - 1, from a difference that is exact: the truth has alpha (1 - p_z) more where z = x, and
    # alpha p_z less where it is not.
    truth = tl.where(kept, alpha, 0.0) + b_z
    model = alpha * p_z + b_z
    possible = (weight > 0) & (model > 0)
    d = tl.where(kept, alpha * (1 - p_z), -alpha * p_z) / tl.where(possible, model, 1.0)
    near = d * d * (0.5 - d * (1.0 / 3 - 0.25 * d))
    log_rho = tl.log(tl.where(possible, truth / tl.where(possible, model, 1.0), 1.0))
    bend = tl.where(tl.abs(d) < 1e-4, near, d - log_rho)
    loss = weight * (alpha * sharp + spread + bend)
    share_x = tl.where(noisy, alpha * p_x / tl.where(noisy, alpha * p_x + b, 1.0), 1.0)
    share_z = tl.where(b_z > 0, alpha * p_z / tl.where(possible, model, 1.0), 1.0)
    by_x = -weight * alpha * share_x
    by_z = -weight * d * share_z

    counts = weight > 0
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0), mask=inside)
    tl.store(d_lse_ptr + row, tl.where(counts, -(by_x + by_z), 0.0), mask=inside)
    tl.store(d_x_ptr + row, tl.where(counts, by_x, 0.0), mask=inside)
    tl.store(d_z_ptr + row, tl.where(counts, by_z, 0.0), mask=inside)
    tl.store(d_total_ptr + row, tl.where(counts, -weight * b, 0.0), mask=inside)
