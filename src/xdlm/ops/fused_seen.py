"""A reverse step's rows on a GPU: which of them an earlier look settles, the others gathered, and what the
head found carried out and remembered.

Each is one Triton kernel, where torch would launch one for every operation. The number of rows that are
left stays on the GPU: programs of rows behind it do nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from xdlm.ops.device import given_or
from xdlm.ops.doubts import SLACK, Doubts, Odds, TakenRows


class Memory(NamedTuple):
    """What the head found at P positions when it last looked there: hidden states [P, d] and log Z."""

    hidden: Tensor
    log_total: Tensor


def fused_doubts(
    hidden: Tensor,
    rows: Tensor,
    at: Tensor,
    before: Memory,
    weight: Tensor,
    bias: Tensor | None,
    radius: Tensor,
    z: Tensor,
    odds: Odds,
) -> tuple[Tensor, Doubts]:
    """For R rows, with h = hidden[rows] at positions `at`, tokens z[at] and bars by `odds`: whether

        l_z - log_total[at] - |h - before[at]| radius >= bar

    fails to hold, and `l_z = h . weight[z] + bias[z]`, float32, with the bars. Where z is noise for sure,
    nobody asks how likely it is: l_z is -inf, and the bar infinite."""
    logit, bar = (torch.empty(len(rows), device=hidden.device) for _ in range(2))
    doubtful = torch.empty(len(rows), dtype=torch.bool, device=hidden.device)
    if len(rows):
        width = hidden.shape[-1]
        _doubt_kernel[(len(rows),)](
            hidden, rows, at, *before, weight, given_or(bias, weight), radius, z, *_flat(odds), logit, bar,
            doubtful, hidden.stride(0), before.hidden.stride(0), weight.stride(0), *_steps(odds),
            SLACK, HAS_BIAS=bias is not None, WIDTH=width, SPAN=triton.next_power_of_2(width),
            num_warps=4,
        )  # fmt: skip
    return doubtful, Doubts(logit, bar)


def fused_take(
    hidden: Tensor,
    rows: Tensor,
    at: Tensor,
    which: Tensor | None,
    count: Tensor,
    uniform: Tensor,
    doubts: Doubts | None,
) -> TakenRows:
    """Row `which[i]` of R becomes row i (without `which`, all stay in order): of the first `count` rows
    their places and states, the numbers to draw by there, and doubts."""
    n, width = len(at), hidden.shape[-1]
    own = None if doubts is None else Doubts(*(torch.empty_like(d) for d in doubts))
    taken = TakenRows(hidden.new_empty(n, width), torch.empty_like(at), uniform.new_empty(n), own)
    if n:
        given, found = ((uniform, uniform) if d is None else d for d in (doubts, own))
        _take_kernel[(n,)](
            hidden, rows, at, given_or(which, at), count, uniform, *given, *taken[:3], *found,
            hidden.stride(0), CHOSEN=which is not None, IN_DOUBT=doubts is not None, WIDTH=width,
            SPAN=triton.next_power_of_2(width), num_warps=2,
        )  # fmt: skip
    return taken


def fused_settle(
    taken: TakenRows,
    count: Tensor,
    drawn: Tensor,
    p_z: Tensor,
    odds: Odds | None,
    other: Tensor,
    z: Tensor,
    before: Memory | None,
) -> None:
    """Of the first `count` rows those that are noise become, in `z` [P], the token `drawn` where a draw was
    wanted, else `other` [P]. Without `odds` all of them are noise. Where there was doubt, what the head
    found goes into `before`: the state, and `log Z = l_z - log p(z)`."""
    n, width = taken.hidden.shape
    if n:
        assert (odds is None) == (taken.doubts is None) == (before is None)
        chances = (other, p_z, p_z, p_z) if odds is None else _flat(odds)
        memory = (taken.hidden, p_z) if before is None else before
        steps = (0, 0, 1) if odds is None else _steps(odds)
        _settle_kernel[(n,)](
            taken.hidden, taken.at, taken.uniform, (taken.doubts or (p_z,))[0], count, drawn, p_z, *chances,
            other, z, *memory, memory[0].stride(0), *steps, IN_DOUBT=odds is not None, WIDTH=width,
            SPAN=triton.next_power_of_2(width), num_warps=2,
        )  # fmt: skip


def _flat(odds: Odds) -> tuple[Tensor, ...]:
    return odds.in_doubt.contiguous(), odds.accept.contiguous(), odds.alpha, odds.b


def _steps(odds: Odds) -> tuple[int, int, int]:
    """From sequence to sequence: of alpha and b, which may be one number for all, and of positions."""
    return odds.alpha.stride(0), odds.b.stride(0), odds.length


#: What is another number in the first step must not compile a kernel twice.
_PLAIN = ["alpha_stride", "b_stride", "length"]


@triton.jit(do_not_specialize=_PLAIN)
def _doubt_kernel(
    hidden_ptr, rows_ptr, at_ptr, before_ptr, log_total_ptr, weight_ptr, bias_ptr, radius_ptr, z_ptr,
    in_doubt_ptr, accept_ptr, alpha_ptr, b_ptr, logit_ptr, bar_ptr, doubtful_ptr, hidden_stride,
    before_stride, weight_stride, alpha_stride, b_stride, length, slack, HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.load(at_ptr + row).to(tl.int64)
    if tl.load(in_doubt_ptr + at):
        feature = tl.arange(0, SPAN)
        inside = feature < WIDTH
        z = tl.load(z_ptr + at).to(tl.int64)
        start = tl.load(rows_ptr + row).to(tl.int64) * hidden_stride
        now = tl.load(hidden_ptr + start + feature, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(before_ptr + at * before_stride + feature, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + z * weight_stride + feature, mask=inside, other=0.0)
        sequence, accept = at // length, tl.load(accept_ptr + at)
        alpha = tl.load(alpha_ptr + sequence * alpha_stride)
        b = tl.load(b_ptr + sequence * b_stride)
        bar = tl.log(b / alpha * (1 - accept) / accept).to(tl.float32) + slack
        move = now - before.to(tl.float32)
        logit = tl.sum(now * weight.to(tl.float32), 0)
        if HAS_BIAS:
            logit += tl.load(bias_ptr + z).to(tl.float32)
        moved = tl.sqrt(tl.sum(move * move, 0))
        least = logit - tl.load(log_total_ptr + at) - moved * tl.load(radius_ptr)
        tl.store(logit_ptr + row, logit)
        tl.store(bar_ptr + row, bar)
        tl.store(doubtful_ptr + row, ((least >= bar) == 0).to(tl.int1))  # also where one is NaN
    else:
        tl.store(logit_ptr + row, -float("inf"))
        tl.store(bar_ptr + row, float("inf"))
        tl.store(doubtful_ptr + row, (at >= 0).to(tl.int1))


@triton.jit
def _take_kernel(
    hidden_ptr, rows_ptr, at_ptr, which_ptr, count_ptr, uniform_ptr, logit_ptr, bar_ptr,
    out_ptr, out_at_ptr, out_uniform_ptr, out_logit_ptr, out_bar_ptr, stride, CHOSEN: tl.constexpr,
    IN_DOUBT: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(count_ptr):
        which = row
        if CHOSEN:
            which = tl.load(which_ptr + row)
        at = tl.load(at_ptr + which)
        tl.store(out_at_ptr + row, at)
        tl.store(out_uniform_ptr + row, tl.load(uniform_ptr + at))
        if IN_DOUBT:
            tl.store(out_logit_ptr + row, tl.load(logit_ptr + which))
            tl.store(out_bar_ptr + row, tl.load(bar_ptr + which))
        feature = tl.arange(0, SPAN)
        start = tl.load(rows_ptr + which).to(tl.int64) * stride
        state = tl.load(hidden_ptr + start + feature, mask=feature < WIDTH, other=0.0)
        tl.store(out_ptr + row * WIDTH + feature, state, mask=feature < WIDTH)


@triton.jit(do_not_specialize=_PLAIN)
def _settle_kernel(
    hidden_ptr, at_ptr, uniform_ptr, logit_ptr, count_ptr, drawn_ptr, p_z_ptr,
    in_doubt_ptr, accept_ptr, alpha_ptr, b_ptr, other_ptr, z_ptr, before_ptr, log_total_ptr,
    before_stride, alpha_stride, b_stride, length, IN_DOUBT: tl.constexpr, WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(count_ptr):
        at = tl.load(at_ptr + row).to(tl.int64)
        noisy = row >= 0
        if IN_DOUBT:  # noqa: SIM102, known when it is compiled
            if tl.load(in_doubt_ptr + at):
                p_z, sequence = tl.load(p_z_ptr + row), at // length
                alpha = tl.load(alpha_ptr + sequence * alpha_stride)
                b = tl.load(b_ptr + sequence * b_stride)
                noisy = tl.load(accept_ptr + at) * (alpha * p_z + b) < b
                log_p = tl.log(p_z).to(tl.float32)
                tl.store(log_total_ptr + at, tl.load(logit_ptr + row) - log_p)
                feature = tl.arange(0, SPAN)
                state = tl.load(hidden_ptr + row * WIDTH + feature, mask=feature < WIDTH, other=0.0)
                tl.store(before_ptr + at * before_stride + feature, state, mask=feature < WIDTH)
        if noisy:
            wants_draw = tl.load(uniform_ptr + row) >= 0
            token = tl.where(wants_draw, tl.load(drawn_ptr + row), tl.load(other_ptr + at))
            tl.store(z_ptr + at, token)
