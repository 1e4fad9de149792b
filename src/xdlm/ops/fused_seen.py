"""Rows that an earlier look settles, on a GPU: which they are, and the others gathered and remembered.

Each is one Triton kernel, where torch would launch one for every operation. The number of rows that are
left stays on the GPU: programs of rows behind it do nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xdlm.ops.device import given_or
from xdlm.ops.gather import TakenRows


def fused_doubts(
    hidden: Tensor,
    rows: Tensor,
    at: Tensor,
    before: Tensor,
    log_total: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    radius: Tensor,
    z: Tensor,
    bar: Tensor,
    rounding: float,
) -> tuple[Tensor, Tensor]:
    """For R rows, with h = hidden[rows] at positions `at` and tokens z[at]: whether

        l_z - log_total[at] - |h - before[at]| radius - rounding >= bar[at]

    fails to hold, and `l_z = h . weight[z] + bias[z]`, float32."""
    logit = torch.empty(len(rows), device=hidden.device)
    doubtful = torch.empty(len(rows), dtype=torch.bool, device=hidden.device)
    if len(rows):
        width = hidden.shape[-1]
        _doubt_kernel[(len(rows),)](
            hidden, rows, at, before, log_total, weight, given_or(bias, weight), radius, z, bar, logit,
            doubtful, hidden.stride(0), before.stride(0), weight.stride(0), rounding,
            HAS_BIAS=bias is not None, WIDTH=width, SPAN=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
    return doubtful, logit


def fused_take(
    hidden: Tensor,
    rows: Tensor,
    at: Tensor,
    which: Tensor,
    count: Tensor,
    uniform: Tensor,
    z: Tensor,
    bar: Tensor,
    slack: float,
) -> TakenRows:
    """Row `which[i]` of R becomes row i: its place, and of the first `count` rows their states and what is
    at their places: numbers to draw by, tokens, and bars, raised by `slack`."""
    n, width = len(which), hidden.shape[-1]
    taken = TakenRows(hidden.new_empty(n, width), torch.empty_like(at), uniform.new_empty(n),
                      z.new_empty(n), bar.new_empty(n))  # fmt: skip
    if n:
        _take_kernel[(n,)](
            hidden, rows, at, which, count, uniform, z, bar, *taken, hidden.stride(0), slack,
            WIDTH=width, SPAN=triton.next_power_of_2(width), num_warps=2,
        )  # fmt: skip
    return taken


def fused_remember(
    taken: TakenRows,
    which: Tensor,
    logit: Tensor,
    p_z: Tensor,
    count: Tensor,
    before: Tensor,
    log_total: Tensor,
) -> None:
    """Of the first `count` rows, the states into `before` and `log Z = l_z - log p(z)` into `log_total`, at
    their places; the other rows' p(z) becomes infinite."""
    n, width = taken.hidden.shape
    if n:
        _remember_kernel[(n,)](
            taken.hidden, taken.at, which, logit, p_z, count, before, log_total, before.stride(0),
            WIDTH=width, SPAN=triton.next_power_of_2(width), num_warps=2,
        )  # fmt: skip


@triton.jit
def _doubt_kernel(
    hidden_ptr, rows_ptr, at_ptr, before_ptr, log_total_ptr, weight_ptr, bias_ptr, radius_ptr, z_ptr,
    bar_ptr, logit_ptr, doubtful_ptr, hidden_stride, before_stride, weight_stride, rounding,
    HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    feature = tl.arange(0, SPAN)
    inside = feature < WIDTH
    at = tl.load(at_ptr + row).to(tl.int64)
    z = tl.load(z_ptr + at).to(tl.int64)
    start = tl.load(rows_ptr + row).to(tl.int64) * hidden_stride
    now = tl.load(hidden_ptr + start + feature, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(before_ptr + at * before_stride + feature, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + z * weight_stride + feature, mask=inside, other=0.0)
    move = now - before.to(tl.float32)
    logit = tl.sum(now * weight.to(tl.float32), 0)
    if HAS_BIAS:
        logit += tl.load(bias_ptr + z).to(tl.float32)
    moved = tl.sqrt(tl.sum(move * move, 0))
    least = logit - tl.load(log_total_ptr + at) - moved * tl.load(radius_ptr) - rounding
    tl.store(logit_ptr + row, logit)
    settled = least >= tl.load(bar_ptr + at)
    tl.store(doubtful_ptr + row, (settled == 0).to(tl.int1))  # also where one is not a number


@triton.jit
def _take_kernel(
    hidden_ptr, rows_ptr, at_ptr, which_ptr, count_ptr, uniform_ptr, z_ptr, bar_ptr,
    out_ptr, out_at_ptr, out_uniform_ptr, out_z_ptr, out_bar_ptr, stride, slack,
    WIDTH: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    which = tl.load(which_ptr + row)
    at = tl.load(at_ptr + which)
    tl.store(out_at_ptr + row, at)
    if row < tl.load(count_ptr):
        tl.store(out_uniform_ptr + row, tl.load(uniform_ptr + at))
        tl.store(out_z_ptr + row, tl.load(z_ptr + at))
        tl.store(out_bar_ptr + row, tl.load(bar_ptr + at) + slack)
        feature = tl.arange(0, SPAN)
        start = tl.load(rows_ptr + which).to(tl.int64) * stride
        state = tl.load(hidden_ptr + start + feature, mask=feature < WIDTH, other=0.0)
        tl.store(out_ptr + row * WIDTH + feature, state, mask=feature < WIDTH)


@triton.jit
def _remember_kernel(
    hidden_ptr, at_ptr, which_ptr, logit_ptr, p_z_ptr, count_ptr, before_ptr, log_total_ptr,
    before_stride, WIDTH: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(count_ptr):
        at = tl.load(at_ptr + row).to(tl.int64)
        logit = tl.load(logit_ptr + tl.load(which_ptr + row))
        log_p = tl.log(tl.load(p_z_ptr + row)).to(tl.float32)
        tl.store(log_total_ptr + at, logit - log_p)
        feature = tl.arange(0, SPAN)
        state = tl.load(hidden_ptr + row * WIDTH + feature, mask=feature < WIDTH, other=0.0)
        tl.store(before_ptr + at * before_stride + feature, state, mask=feature < WIDTH)
    else:
        tl.store(p_z_ptr + row, float("inf"))
