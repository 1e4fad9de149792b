"""The output head together with the four numbers per row that every loss needs.

Two entries: `row_stats` gives the numbers, with gradients. `row_loss` gives a sum of losses of them and
computes the gradient on the way, while a block of logits is at hand, so that no block is computed twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from xdlm.errors import UserError, did_you_mean
from xdlm.ops.device import kernel_obstacle, no_autocast
from xdlm.structs import HeadRows, RowLosses, RowStats

Impl = Literal["auto", "eager", "chunked", "fused"]

#: So few rows are one block, of all vocabularies there are: "chunked" would do the same in more calls.
_FEW = 8

#: From the statistics of rows: writes the losses of some of them (a slice of all), and the losses'
#: derivatives by each statistic, into their places.
RowLoss = Callable[[RowStats, slice, RowLosses], None]


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

    `impl`: "eager" holds all logits; "chunked" holds a bounded block of rows of them and computes
    them again in the backward pass, unless they are few (256 MiB in float32) and were kept; "fused" has
    Triton kernels on a GPU, and keeps none. "auto" is "fused" where it can run and "chunked" elsewhere.
    """
    impl = resolve_impl(impl, hidden.device, hidden.dtype)
    special = special_tuple(mask_id)
    weight, bias = _as_hidden(hidden, weight, bias)
    if impl == "eager" or (impl == "chunked" and x.numel() <= _FEW):
        return stats_of_logits(_product(hidden, weight, bias), x, z, log_c, mask_id=special)
    from xdlm.ops.blocks import blocked_row_stats

    rows = HeadRows(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, x.reshape(-1), z.reshape(-1),
        None if log_c is None else log_c.reshape(-1),
    )  # fmt: skip
    stats = blocked_row_stats(rows, special, impl)
    return RowStats(*(field.reshape(x.shape) for field in stats))


def row_loss(
    rows: HeadRows,
    loss: RowLoss,
    *,
    mask_id: int | Sequence[int] | None,
    impl: Impl = "auto",
) -> Tensor:
    """The sum over rows of a loss of their statistics, float64, with gradients to the head's inputs."""
    impl = resolve_impl(impl, rows.hidden.device, rows.hidden.dtype)
    if impl == "eager":
        raise UserError("row_loss works in blocks; for impl='eager' use row_stats and its gradient")
    from xdlm.ops.blocks import blocked_row_loss

    weight, bias = _as_hidden(rows.hidden, rows.weight, rows.bias)
    rows = rows._replace(weight=weight, bias=bias)
    return blocked_row_loss(rows, special_tuple(mask_id), impl, loss)


def resolve_impl(impl: Impl, device: torch.device, dtype: torch.dtype = torch.float32) -> Impl:
    """The implementation that `impl` means on a device. "auto" is "fused" where kernels can run and
    "chunked" elsewhere, with a warning where kernels could be expected. A name that cannot run there is
    an error."""
    if impl not in get_args(Impl):
        raise UserError(f"unknown impl '{impl}'{did_you_mean(impl, get_args(Impl))}")
    if impl not in ("auto", "fused"):
        return impl
    obstacle = fused_obstacle(device, dtype)
    if impl == "fused" and obstacle:
        raise UserError(f"impl='fused' cannot run here: {obstacle}; use 'auto' or 'chunked'")
    if obstacle and device.type != "cpu" and dtype != torch.float64:
        _say_once(f"the output head runs without kernels (impl='chunked'): {obstacle}")
    return "chunked" if obstacle else "fused"


@cache
def _say_once(line: str) -> None:
    warnings.warn(line, stacklevel=3)


def fused_obstacle(device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the Triton kernels cannot run on a device; None if they can."""
    if dtype == torch.float64:
        return "the Triton kernels add up in float32, not float64"
    if device.type != "cuda":
        return f"the Triton kernels need a CUDA device, not {device.type}"
    return kernel_obstacle()


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
    c = log_c.to(logits.dtype).exp()
    probs = (relative - log_sum[..., None]).exp()
    return RowStats(lse, logit_x, logit_z, torch.log1p(c[..., None] * probs).sum(-1))


def head_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, special: tuple[int, ...] = ()
) -> Tensor:
    """Logits [R, V] in float32 (or float64), special tokens at -inf. On a GPU the sums of a product
    of low precision come out unrounded."""
    weight, bias = _as_hidden(hidden, weight, bias)
    dtype = work_dtype(hidden.dtype)
    if hidden.dtype == dtype or not hidden.is_cuda:
        return _forbid_in_place(_product(hidden, weight, bias), special)
    logits = torch.mm(hidden, weight.T, out_dtype=dtype)
    if bias is not None:
        logits += bias
    return _forbid_in_place(logits, special)


def forbid(logits: Tensor, special: tuple[int, ...]) -> Tensor:
    """Logits with every special token's at -inf: a prediction is of clean data."""
    return _forbid_in_place(logits.clone(), special) if special else logits


def _forbid_in_place(logits: Tensor, special: tuple[int, ...]) -> Tensor:
    for token in special:  # not by a tensor of them, which a GPU would have to wait for
        logits.narrow(-1, token, 1).fill_(-torch.inf)
    return logits


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """From logits onward: float32, whatever the trunk ran in; float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def special_tuple(mask_id: int | Sequence[int] | None) -> tuple[int, ...]:
    if mask_id is None:
        return ()
    return (mask_id,) if isinstance(mask_id, int) else tuple(mask_id)


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`hidden @ weight.T + bias` added up and given in float32, whatever the factors are."""
    dtype = work_dtype(hidden.dtype)
    with no_autocast(hidden):
        return F.linear(
            hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )


def _as_hidden(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The head's parameters in the trunk's dtype; a gradient flows back through the cast."""
    return weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
