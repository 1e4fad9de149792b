"""A denoiser's head as losses and samplers use it, be it linear or not."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from xdlm.errors import UserError
from xdlm.models.contract import Denoiser
from xdlm.ops.dense import dense_row_stats
from xdlm.ops.head import DrawingHead, FunctionHead, RowDraws
from xdlm.ops.rows import Impl, row_stats, stats_of_logits
from xdlm.structs import RowStats


def head_stats(
    denoiser: Denoiser,
    hidden: Tensor,
    x: Tensor,
    z: Tensor,
    log_c: Tensor | None,
    *,
    mask_id: int | Sequence[int] | None,
    impl: Impl = "auto",
) -> RowStats:
    """The four statistics of every row of `hidden`. For a head that is not linear, "eager" holds all
    logits, "chunked" a block of them, "fused" is for one that has a kernel of its own, and "auto" takes the
    shortest way that the head knows."""
    if denoiser.linear_head:
        head = (denoiser.head_weight, denoiser.head_bias)
        return row_stats(hidden, *head, x, z, log_c, mask_id=mask_id, impl=impl)
    if impl == "fused" and not denoiser.has_kernel_for(hidden):
        raise UserError("loss.impl 'fused' has no kernel for this model's head here; use 'auto'")
    if impl in ("auto", "fused"):
        own = denoiser.own_stats(hidden, x, z, log_c)
        if own is not None:
            return own
    if impl == "eager":
        return stats_of_logits(denoiser.head(hidden), x, z, log_c, mask_id=mask_id)
    size = denoiser.n_states
    return dense_row_stats(denoiser.head, hidden, x, z, log_c, size=size, mask_id=mask_id)


def drawing_head(denoiser: Denoiser, special: tuple[int, ...]) -> RowDraws:
    """Draws from the denoiser's predictions, in which special tokens never come up."""
    if denoiser.linear_head:
        return DrawingHead(denoiser.head_weight, denoiser.head_bias, special)
    return FunctionHead(
        denoiser.head, denoiser.n_states, special, denoiser.device, denoiser.own_draws
    )
