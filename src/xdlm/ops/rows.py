"""`row_stats`: the output head fused with the four numbers per row that every loss needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from xdlm.errors import UserError, did_you_mean
from xdlm.structs import RowStats

Impl = Literal["auto", "eager", "chunked"]

#: Beyond this, torch's softplus returns its argument; e^-40 is below float64's resolution.
SOFTPLUS_THRESHOLD = 40.0


def row_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    z: Tensor,
    log_c: Tensor | None,
    *,
    mask_id: int | Sequence[int] | None,
    impl: Impl = "auto",
) -> RowStats:
    """Statistics of `logits = hidden @ weight.T + bias` per row, with gradients to all three.

    `hidden` [..., d], `weight` [V, d], `bias` [V]; `x`, `z` [...] token ids; `log_c` [...] or None
    when no sum over the vocabulary is needed (S is then 0). `mask_id` names the special token or
    tokens, whose logits count as -inf. Logits are float32 from here on, or float64 if `hidden` is.

    `impl`: "eager" holds all logits; "chunked" never holds more than a few hundred rows of them and
    computes them again in the backward pass. "auto" is "chunked".
    """
    if impl not in get_args(Impl):
        raise UserError(f"unknown impl '{impl}'{did_you_mean(impl, get_args(Impl))}")
    special = special_tuple(mask_id)
    # The head's parameters follow the trunk's dtype; a gradient flows back through the cast.
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    if impl == "eager":
        logits = F.linear(hidden, weight, bias)
        return stats_of_logits(logits, x, z, log_c, mask_id=special)
    from xdlm.ops.chunked import chunked_row_stats

    shape = x.shape
    flat_c = None if log_c is None else log_c.reshape(-1)
    stats = chunked_row_stats(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, x.reshape(-1), z.reshape(-1), flat_c,
        special,
    )  # fmt: skip
    return RowStats(*(field.reshape(shape) for field in stats))


def stats_of_logits(
    logits: Tensor,
    x: Tensor,
    z: Tensor,
    log_c: Tensor | None,
    *,
    mask_id: int | Sequence[int] | None,
) -> RowStats:
    """The same four numbers from logits [..., V] that are already there."""
    logits = forbid(logits.to(work_dtype(logits.dtype)), special_tuple(mask_id))
    top = logits.detach().amax(-1, keepdim=True)
    relative = logits - top
    log_sum = relative.logsumexp(-1)
    logit_x = logits.gather(-1, x[..., None])[..., 0].double()
    logit_z = logits.gather(-1, z[..., None])[..., 0].double()
    lse = top[..., 0].double() + log_sum.double()
    if log_c is None:
        return RowStats(lse, logit_x, logit_z, torch.zeros_like(log_sum))
    shifted = relative + (log_c.to(logits.dtype) - log_sum)[..., None]
    softplus = F.softplus(shifted, threshold=SOFTPLUS_THRESHOLD)
    return RowStats(lse, logit_x, logit_z, softplus.sum(-1))


def forbid(logits: Tensor, special: tuple[int, ...]) -> Tensor:
    """Logits with every special token's at -inf: a prediction is of clean data."""
    if not special:
        return logits
    return logits.index_fill(-1, torch.tensor(special, device=logits.device), -torch.inf)


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """From logits onward: float32, whatever the trunk ran in; float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def special_tuple(mask_id: int | Sequence[int] | None) -> tuple[int, ...]:
    if mask_id is None:
        return ()
    return (mask_id,) if isinstance(mask_id, int) else tuple(mask_id)
