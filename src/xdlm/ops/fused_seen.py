"""The logit of a row's own token and how far the row has moved, in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def fused_move(
    hidden: Tensor, rows: Tensor, before: Tensor, at: Tensor, weight: Tensor, z: Tensor
) -> tuple[Tensor, Tensor]:
    """For R rows, float32: `hidden[rows] . weight[z]` and `|hidden[rows] - before[at]|`."""
    logit, moved = torch.empty(2, len(rows), device=hidden.device)
    if len(rows):
        width = hidden.shape[-1]
        _move_kernel[(len(rows),)](
            hidden, rows, before, at, weight, z, logit, moved, hidden.stride(0), before.stride(0),
            weight.stride(0), WIDTH=width, SPAN=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
    return logit, moved


@triton.jit
def _move_kernel(
    hidden_ptr, rows_ptr, before_ptr, at_ptr, weight_ptr, z_ptr, logit_ptr, moved_ptr,
    hidden_stride, before_stride, weight_stride, WIDTH: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    feature = tl.arange(0, SPAN)
    inside = feature < WIDTH
    start = tl.load(rows_ptr + row).to(tl.int64) * hidden_stride
    now = tl.load(hidden_ptr + start + feature, mask=inside, other=0.0).to(tl.float32)
    start = tl.load(at_ptr + row).to(tl.int64) * before_stride
    before = tl.load(before_ptr + start + feature, mask=inside, other=0.0).to(tl.float32)
    start = tl.load(z_ptr + row).to(tl.int64) * weight_stride
    weight = tl.load(weight_ptr + start + feature, mask=inside, other=0.0).to(tl.float32)
    tl.store(logit_ptr + row, tl.sum(now * weight, 0))
    tl.store(moved_ptr + row, tl.sqrt(tl.sum((now - before) * (now - before), 0)))
