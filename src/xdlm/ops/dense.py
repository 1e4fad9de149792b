"""The statistics of rows under a head that is any function of hidden states, in plain torch.

It calls the function on a block of rows at a time, and computes their logits again in the backward pass
rather than keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from xdlm.ops.blocks import blocks
from xdlm.ops.rows import stats_of_logits
from xdlm.structs import RowStats

#: Float32 logits [R, V] of hidden rows [R, d].
Logits = Callable[[Tensor], Tensor]


def dense_row_stats(
    logits: Logits,
    hidden: Tensor,
    x: Tensor,
    z: Tensor,
    log_c: Tensor | None,
    *,
    size: int,
    mask_id: int | Sequence[int] | None,
) -> RowStats:
    """`row_stats` of `logits(hidden)` over a vocabulary of `size` states, with gradients to `hidden`."""

    def of(hidden: Tensor, x: Tensor, z: Tensor, log_c: Tensor | None) -> RowStats:
        return stats_of_logits(logits(hidden), x, z, log_c, mask_id=mask_id)

    shape, rows = x.shape, hidden.reshape(-1, hidden.shape[-1])
    x, z, log_c = x.reshape(-1), z.reshape(-1), None if log_c is None else log_c.reshape(-1)
    parts = []
    for part in blocks(len(rows), size, block_elements(hidden.device)):
        given = rows[part], x[part], z[part], None if log_c is None else log_c[part]
        if torch.is_grad_enabled():
            parts.append(checkpoint(of, *given, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(of(*given))
    if not parts:
        parts.append(of(rows, x, z, log_c))
    return RowStats(*(torch.cat(field).view(shape) for field in zip(*parts, strict=True)))


def block_elements(device: torch.device) -> int:
    """Logits in a block: about a CPU's cache, or enough to keep a GPU busy."""
    return 1 << (24 if device.type == "cuda" else 20)
