"""The adaptive norm of a DiT and the residual sum before it, one Triton kernel each way.

    h' = h + gate * dropout(branch + bias)
    y  = layer_norm(h') * weight * (1 + scale) + shift

Backward reads each tensor once. The sums over tokens that the gradients of gate, scale, shift, weight
and bias need are added up on the way, a chunk of tokens per program, and put together at the end. Which
numbers dropout removes is a hash of (seed, token, feature), made anew in the backward pass.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from xdlm.ops.device import given_or, multiprocessors

#: Programs of the backward pass per multiprocessor, and registers of a thread so that they all fit.
_RESIDENT, _REGISTERS = 4, 128
#: The tile in which their sums are put together.
_ROWS, _COLUMNS = 64, 16


class Branch(Protocol):
    """What is added to the stream: value [B, L, W], bias [W] or None, gate [1 or B, W]. What dropout
    removes follows from the seed, int32 [1]."""

    @property
    def value(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def gate(self) -> Tensor: ...

    @property
    def dropout(self) -> float: ...

    @property
    def seed(self) -> Tensor | None: ...


def fused_adaptive_norm(
    h: Tensor,
    weight: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    branch: Branch | None = None,
    eps: float = 1e-5,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """`h'` and `y` for `h` [B, L, W]; `scale`, `shift` and the branch's gate are all [1, W] or [B, W].

    In place, which has no gradient, `h'` is written over `h` and `y` over the branch's value.
    """
    assert len(scale) == len(shift) == (len(scale) if branch is None else len(branch.gate))
    value, bias, gate, dropout, seed = (None, None, None, 0.0, None) if branch is None else (
        branch.value, branch.bias, branch.gate, branch.dropout, branch.seed
    )  # fmt: skip
    assert (seed is not None) or not dropout
    if in_place:
        y = torch.empty_like(h) if value is None else value
        _launch_forward(h, value, bias, gate, weight, scale, shift, h, y, None, dropout, seed, eps)
        return h, y
    result = _AdaptiveNorm.apply(h, value, bias, gate, weight, scale, shift, dropout, seed, eps)
    return (h, result) if value is None else result


def _launch_forward(
    h: Tensor, value: Tensor | None, bias: Tensor | None, gate: Tensor | None, weight: Tensor,
    scale: Tensor, shift: Tensor, after: Tensor, y: Tensor, moments: Tensor | None, dropout: float,
    seed: Tensor | None, eps: float,
) -> None:  # fmt: skip
    batch, length, width = h.shape
    assert h.is_contiguous() and y.is_contiguous() and (value is None or value.is_contiguous())
    mean, rstd = (h, h) if moments is None else moments.unbind()
    block = triton.next_power_of_2(width)
    _forward_kernel[(batch * length,)](
        h, given_or(value, h), given_or(bias, h), given_or(gate, h), weight, scale, shift,
        after, y, mean, rstd, length, _rows(gate), _rows(scale), _rows(shift), given_or(seed, h),
        *_dropout(dropout), W=width, BLOCK=block,
        HAS_BRANCH=value is not None, HAS_BIAS=bias is not None, DROPOUT=dropout > 0,
        KEEP_MOMENTS=moments is not None, EPS=eps, num_warps=min(32, max(1, block // 1024)),
    )  # fmt: skip


class _AdaptiveNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, value: Tensor | None, bias: Tensor | None, gate: Tensor | None,
        weight: Tensor, scale: Tensor, shift: Tensor, dropout: float, seed: Tensor | None,
        eps: float,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        h = h.contiguous()
        value = None if value is None else value.contiguous()
        after = torch.empty_like(h) if value is not None else h
        y = torch.empty_like(h)
        moments = h.new_empty(2, h.shape[0] * h.shape[1], dtype=torch.float32)
        _launch_forward(
            h, value, bias, gate, weight, scale, shift, after, y, moments, dropout, seed, eps
        )  # fmt: skip
        ctx.save_for_backward(after, value, bias, gate, weight, scale, moments, seed)
        ctx.dropout = dropout
        ctx.set_materialize_grads(False)
        return y if value is None else (after, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        d_after, d_y = upstream if len(upstream) == 2 else (None, *upstream)
        after, value, bias, gate, weight, scale, moments, seed = ctx.saved_tensors
        batch, length, width = after.shape
        d_y = torch.zeros_like(after) if d_y is None else d_y.contiguous()
        d_after = None if d_after is None else d_after.contiguous()
        d_h = torch.empty_like(after)
        d_value = torch.empty_like(after) if value is not None else None
        if len(scale) == 1:  # one sum for all, so that chunks may go on from entry to entry
            batch, length = 1, batch * length
        chunk = max(1, triton.cdiv(length, max(1, _RESIDENT * multiprocessors(after) // batch)))
        chunks = triton.cdiv(length, chunk)
        n_sums, block = 2 if value is None else 4, triton.next_power_of_2(width)
        sums = after.new_empty(batch, chunks, n_sums, width, dtype=torch.float32)
        _backward_kernel[(batch, chunks)](
            d_y, given_or(d_after, d_y), after, given_or(value, d_y), given_or(bias, d_y),
            given_or(gate, d_y), weight, scale, *moments.unbind(), d_h, given_or(d_value, d_h), sums,
            length, chunk, _rows(gate), _rows(scale), given_or(seed, d_y), *_dropout(ctx.dropout),
            W=width, BLOCK=block, HAS_AFTER=d_after is not None, HAS_BRANCH=value is not None,
            HAS_BIAS=bias is not None, DROPOUT=ctx.dropout > 0,
            num_warps=min(32, max(4, block // 256)), maxnreg=_REGISTERS,
        )  # fmt: skip
        d_weight, d_bias = weight.new_empty(2, width).unbind()
        d_scale, d_shift, d_gate = weight.new_empty(3, batch, width).unbind()
        _finish_kernel[(triton.cdiv(width, _COLUMNS),)](
            sums, weight, scale, d_weight, d_bias, d_scale, d_shift, d_gate, _rows(scale), batch, chunks,
            W=width, HAS_BRANCH=value is not None, ROWS=_ROWS, COLUMNS=_COLUMNS,
        )  # fmt: skip
        return (
            d_h, d_value, None if bias is None else d_bias, None if value is None else d_gate,
            d_weight, d_scale, d_shift, None, None, None,
        )  # fmt: skip


def _rows(condition: Tensor | None) -> int:
    """The step from one batch entry's conditioning row to the next; 0 if all share one."""
    return condition.stride(0) if condition is not None and len(condition) > 1 else 0


def _dropout(probability: float) -> tuple[int, float]:
    """A hash of 31 bits below the first number means removed; what stays is scaled by the second."""
    return round(probability * 2**31), 1 / (1 - probability)


@triton.jit
def _mix(value):
    """A well-mixing permutation of 32-bit numbers (constants: C. Wellons, hash-prospector)."""
    value = value ^ (value >> 16)
    value = value * 0x7FEB352D
    value = value ^ (value >> 15)
    value = value * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _keep(seed, token, feature, threshold, factor):
    """`factor` where dropout keeps a number, 0 where it removes it."""
    key = _mix(_mix(seed.to(tl.uint32)) + token.to(tl.uint32))
    bits = _mix(key ^ (feature.to(tl.uint32) * 0x9E3779B9)) >> 1
    return tl.where(bits >= threshold.to(tl.uint32), factor, 0.0)


@triton.jit(do_not_specialize=["length", "threshold"])
def _forward_kernel(
    h_ptr, value_ptr, bias_ptr, gate_ptr, weight_ptr, scale_ptr, shift_ptr,
    after_ptr, y_ptr, mean_ptr, rstd_ptr, length, gate_rows, scale_rows, shift_rows, seed_ptr,
    threshold, factor, W: tl.constexpr, BLOCK: tl.constexpr, HAS_BRANCH: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, KEEP_MOMENTS: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    entry = token // length
    feature = tl.arange(0, BLOCK)
    inside = feature < W
    here = token.to(tl.int64) * W + feature
    h = tl.load(h_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        value = tl.load(value_ptr + here, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += tl.load(bias_ptr + feature, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT:
            value *= _keep(tl.load(seed_ptr), token, feature, threshold, factor)
        gate = tl.load(gate_ptr + entry * gate_rows + feature, mask=inside, other=0.0)
        rounded = (h + gate.to(tl.float32) * value).to(after_ptr.dtype.element_ty)
        tl.store(after_ptr + here, rounded, mask=inside)
        h = rounded.to(tl.float32)
    mean = tl.sum(h, 0) / W
    centred = tl.where(inside, h - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 0) / W + EPS)
    weight = tl.load(weight_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + entry * scale_rows + feature, mask=inside, other=0.0)
    shift = tl.load(shift_ptr + entry * shift_rows + feature, mask=inside, other=0.0)
    y = centred * rstd * (weight * (1 + scale.to(tl.float32))) + shift.to(tl.float32)
    tl.store(y_ptr + here, y.to(y_ptr.dtype.element_ty), mask=inside)
    if KEEP_MOMENTS:
        tl.store(mean_ptr + token, mean)
        tl.store(rstd_ptr + token, rstd)


@triton.jit(do_not_specialize=["length", "chunk_size", "threshold"])
def _backward_kernel(
    d_y_ptr, d_after_ptr, after_ptr, value_ptr, bias_ptr, gate_ptr, weight_ptr, scale_ptr,
    mean_ptr, rstd_ptr, d_h_ptr, d_value_ptr, sums_ptr, length, chunk_size, gate_rows,
    scale_rows, seed_ptr, threshold, factor, W: tl.constexpr, BLOCK: tl.constexpr,
    HAS_AFTER: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """With n = layer_norm(h') and g = d_y weight (1 + scale), a token's

    d_h = d_h' + rstd (g - mean(g) - n mean(g n)),    d_branch = d_h gate (kept by dropout)
    """
    entry, chunk = tl.program_id(0), tl.program_id(1)
    feature = tl.arange(0, BLOCK)
    inside = feature < W
    scale = tl.load(scale_ptr + entry * scale_rows + feature, mask=inside, other=0.0)
    gain = tl.load(weight_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    gain *= 1 + scale.to(tl.float32)
    if HAS_BRANCH:
        gate = tl.load(gate_ptr + entry * gate_rows + feature, mask=inside, other=0.0)
        gate = gate.to(tl.float32)
        bias = gate
        if HAS_BIAS:
            bias = tl.load(bias_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    sum_shift = tl.zeros((BLOCK,), tl.float32)
    sum_gain = tl.zeros((BLOCK,), tl.float32)
    sum_gate = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    first = chunk * chunk_size
    end = tl.minimum(first + chunk_size, length)
    # The next token is on its way while this one is worked on. Beyond the end it reads as zeros.
    after, d_y, d_after, value, mean, rstd = _load_token(
        after_ptr, d_y_ptr, d_after_ptr, value_ptr, mean_ptr, rstd_ptr, entry, first, length, end,
        feature, W, HAS_AFTER, HAS_BRANCH,
    )  # fmt: skip
    for i in range(chunk_size):
        position = first + i
        token = entry * length + position
        here = token.to(tl.int64) * W + feature
        store = inside & (position + 0 * feature < end)
        next_after, next_d_y, next_d_after, next_value, next_mean, next_rstd = _load_token(
            after_ptr, d_y_ptr, d_after_ptr, value_ptr, mean_ptr, rstd_ptr, entry, position + 1,
            length, end, feature, W, HAS_AFTER, HAS_BRANCH,
        )  # fmt: skip
        normed = tl.where(inside, (after.to(tl.float32) - mean) * rstd, 0.0)
        upstream = d_y.to(tl.float32)
        sum_shift += upstream
        sum_gain += upstream * normed
        d_h = _through_norm(upstream * gain, normed, rstd, W)
        if HAS_AFTER:
            d_h += d_after.to(tl.float32)
        tl.store(d_h_ptr + here, d_h.to(d_h_ptr.dtype.element_ty), mask=store)
        if HAS_BRANCH:
            branch, d_branch = _through_branch(
                d_h, value, bias, gate, seed_ptr, token, feature, threshold, factor, HAS_BIAS, DROPOUT
            )  # fmt: skip
            sum_gate += d_h * branch
            sum_bias += d_branch
            tl.store(d_value_ptr + here, d_branch.to(d_value_ptr.dtype.element_ty), mask=store)
        after, d_y, d_after, value = next_after, next_d_y, next_d_after, next_value
        mean, rstd = next_mean, next_rstd
    _store_sums(
        sums_ptr, sum_shift, sum_gain, sum_gate, sum_bias, entry, chunk, feature, W, HAS_BRANCH
    )  # fmt: skip


@triton.jit
def _store_sums(
    sums_ptr, sum_shift, sum_gain, sum_gate, sum_bias, entry, chunk, feature, W: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
):  # fmt: skip
    inside = feature < W
    n_sums = 4 if HAS_BRANCH else 2
    at = sums_ptr + (entry * tl.num_programs(1) + chunk).to(tl.int64) * (n_sums * W) + feature
    tl.store(at, sum_shift, mask=inside)
    tl.store(at + W, sum_gain, mask=inside)
    if HAS_BRANCH:
        tl.store(at + 2 * W, sum_gate, mask=inside)
        tl.store(at + 3 * W, sum_bias, mask=inside)


@triton.jit
def _through_norm(g, normed, rstd, W: tl.constexpr):
    """The gradient at what was normed, from that at the result, n."""
    return rstd * (g - tl.sum(g, 0) / W - normed * (tl.sum(g * normed, 0) / W))


@triton.jit
def _through_branch(
    d_h, value, bias, gate, seed_ptr, token, feature, threshold, factor, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
):  # fmt: skip
    """The branch as the gate met it, and its gradient."""
    branch = value.to(tl.float32)
    if HAS_BIAS:
        branch += bias
    d_branch = d_h * gate
    if DROPOUT:
        kept = _keep(tl.load(seed_ptr), token, feature, threshold, factor)
        branch *= kept
        d_branch *= kept
    return branch, d_branch


@triton.jit(do_not_specialize=["batch", "chunks"])
def _finish_kernel(
    sums_ptr, weight_ptr, scale_ptr, d_weight_ptr, d_bias_ptr, d_scale_ptr, d_shift_ptr, d_gate_ptr,
    scale_rows, batch, chunks, W: tl.constexpr, HAS_BRANCH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the chunks, always in the same order, for some features: the gradients of shift, scale and
    gate for each entry, those of weight and bias over all."""
    feature = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = feature < W
    kind = d_weight_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((COLUMNS,), tl.float32)
    d_bias = tl.zeros((COLUMNS,), tl.float32)
    n_sums: tl.constexpr = 4 if HAS_BRANCH else 2
    for entry in range(batch):
        sum_shift = tl.zeros((ROWS, COLUMNS), tl.float32)
        sum_gain = tl.zeros((ROWS, COLUMNS), tl.float32)
        sum_gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        sum_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, chunks, ROWS):
            chunk = start + tl.arange(0, ROWS)
            there = (chunk < chunks)[:, None] & inside[None]
            at = sums_ptr + (entry * chunks + chunk)[:, None] * (n_sums * W) + feature[None]
            sum_shift += tl.load(at, mask=there, other=0.0)
            sum_gain += tl.load(at + W, mask=there, other=0.0)
            if HAS_BRANCH:
                sum_gate += tl.load(at + 2 * W, mask=there, other=0.0)
                sum_bias += tl.load(at + 3 * W, mask=there, other=0.0)
        here = entry * W + feature
        scale = tl.load(scale_ptr + entry * scale_rows + feature, mask=inside, other=0.0)
        gain = tl.sum(sum_gain, 0)
        d_weight += gain * (1 + scale.to(tl.float32))
        tl.store(d_scale_ptr + here, (gain * weight).to(kind), mask=inside)
        tl.store(d_shift_ptr + here, tl.sum(sum_shift, 0).to(kind), mask=inside)
        if HAS_BRANCH:
            d_bias += tl.sum(sum_bias, 0)
            tl.store(d_gate_ptr + here, tl.sum(sum_gate, 0).to(kind), mask=inside)
    tl.store(d_weight_ptr + feature, d_weight.to(kind), mask=inside)
    tl.store(d_bias_ptr + feature, d_bias.to(kind), mask=inside)


@triton.jit
def _load_token(
    after_ptr, d_y_ptr, d_after_ptr, value_ptr, mean_ptr, rstd_ptr, entry, position, length, end,
    feature, W: tl.constexpr, HAS_AFTER: tl.constexpr, HAS_BRANCH: tl.constexpr,
):  # fmt: skip
    token = entry * length + tl.minimum(position, length - 1)
    here = token.to(tl.int64) * W + feature
    inside = (feature < W) & (position + 0 * feature < end)
    after = tl.load(after_ptr + here, mask=inside, other=0.0)
    d_y = tl.load(d_y_ptr + here, mask=inside, other=0.0)
    d_after = d_y
    value = d_y
    if HAS_AFTER:
        d_after = tl.load(d_after_ptr + here, mask=inside, other=0.0)
    if HAS_BRANCH:
        value = tl.load(value_ptr + here, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + token)
    rstd = tl.load(rstd_ptr + token)
    return after, d_y, d_after, value, mean, rstd
