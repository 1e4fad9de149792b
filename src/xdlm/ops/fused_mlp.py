"""The two products of a transformer's MLP with a bias and a GELU between them, for a GPU.

Bias and GELU are one Triton kernel; so are their backward passes, which also add up the bias's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

#: The shape of a program's tile, and how many rows it adds up in the backward pass.
_ROWS, _COLUMNS, _CHUNK = 2, 1024, 32
#: Rows whose inner activations are held at a time where no gradient is asked for: about so many, in equal
#: pieces.
_PIECE = 16384


def fused_mlp(
    h: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, *, in_place: bool = False
) -> Tensor:
    """`gelu(h W_in^T + b) W_out^T` for `h` [..., W], with the tanh form of GELU. In place, which has no
    gradient, the result is written over `h`."""
    flat = h.reshape(-1, h.shape[-1])
    if torch.is_grad_enabled():
        out = _Mlp.apply(flat, weight_in, bias_in, weight_out)
    else:
        out = flat if in_place else flat.new_empty(len(flat), len(weight_out))
        pieces = max(1, round(len(flat) / _PIECE))
        for part, result in zip(flat.chunk(pieces), out.chunk(pieces), strict=True):
            torch.mm(_inner(part, weight_in, bias_in), weight_out.T, out=result)
    return out.view(*h.shape[:-1], len(weight_out))


def _inner(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """On a GPU the product's own epilogue applies bias and GELU: nothing is written twice."""
    if h.is_cuda:
        return torch._addmm_activation(bias, h, weight.T, use_gelu=True)
    return F.gelu(torch.addmm(bias, h, weight.T), approximate="tanh")  # there, that one has erf


class _Mlp(torch.autograd.Function):
    """Keeps what the GELU was given and not what it gave, which the backward pass makes again."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor
    ) -> Tensor:
        before = torch.mm(h, weight_in.T)
        after = torch.empty_like(before)
        rows, columns = before.shape
        grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))
        _gelu_kernel[grid](
            before, bias_in, after, rows, columns, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4
        )
        ctx.save_for_backward(h, weight_in, bias_in, weight_out, before)
        return torch.mm(after, weight_out.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        h, weight_in, bias_in, weight_out, before = ctx.saved_tensors
        d_out = upstream[0].contiguous()
        d_inner = torch.mm(d_out, weight_out)
        after = torch.empty_like(before)
        rows, columns = before.shape
        chunks = triton.cdiv(rows, _CHUNK)
        sums = before.new_empty(chunks, columns, dtype=torch.float32)
        _gelu_backward_kernel[(chunks, triton.cdiv(columns, _COLUMNS))](
            before, bias_in, d_inner, after, sums, rows, columns,
            ROWS=_ROWS, COLUMNS=_COLUMNS, CHUNK=_CHUNK, num_warps=4,
        )  # fmt: skip
        by_h, by_weight_in, by_bias, by_weight_out = ctx.needs_input_grad
        d_weight_out = torch.mm(d_out.T, after) if by_weight_out else None
        del after
        return (
            torch.mm(d_inner, weight_in) if by_h else None,
            torch.mm(d_inner.T, h) if by_weight_in else None,
            sums.sum(0).to(bias_in.dtype) if by_bias else None,
            d_weight_out,
        )


@triton.jit
def _gate_of(x):
    """GELU(x) = x s with s = sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3); gives s and du/dx."""
    square = x * x
    u = 0.7978845608028654 * x * (1 + 0.044715 * square)
    return tl.sigmoid(2 * u), 0.7978845608028654 * (1 + 0.134145 * square)


@triton.jit
def _gelu_kernel(
    before_ptr, bias_ptr, after_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None]
    inside = (row < rows) & (column < columns)
    here = row.to(tl.int64) * columns + column
    x = tl.load(before_ptr + here, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    s, _ = _gate_of(x)
    tl.store(after_ptr + here, (x * s).to(after_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward_kernel(
    before_ptr, bias_ptr, d_ptr, after_ptr, sums_ptr, rows, columns, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Turns the gradient at the GELU's output into that at its input, in place; and writes the output."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None]
    bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, CHUNK, ROWS):
        row = tl.program_id(0) * CHUNK + start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        here = row.to(tl.int64) * columns + column
        x = tl.load(before_ptr + here, mask=inside, other=0.0).to(tl.float32) + bias
        s, du = _gate_of(x)
        tl.store(after_ptr + here, (x * s).to(after_ptr.dtype.element_ty), mask=inside)
        d = tl.load(d_ptr + here, mask=inside, other=0.0).to(tl.float32)
        d *= s + 2 * x * s * (1 - s) * du
        total += d
        tl.store(d_ptr + here, d.to(d_ptr.dtype.element_ty), mask=inside)
    at = tl.program_id(0).to(tl.int64) * columns + column
    tl.store(sums_ptr + at, tl.sum(total, 0)[None], mask=column < columns)
