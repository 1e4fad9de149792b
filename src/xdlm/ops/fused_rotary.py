"""Queries, keys and values from hidden states, with rotary positions, for a GPU.

The product with the packed weights is followed by a Triton kernel that turns queries and keys in place,
so that the three are views of one tensor; backward turns their gradients back and packs them in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


def fused_qkv(
    h: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, heads, L, D] of `h` [B, L, W]; `weight` [3 W, W]; `cos`, `sin` float32 [L, D/2]."""
    return _Qkv.apply(h, weight, cos.contiguous(), sin.contiguous(), heads)


class _Qkv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int
    ) -> tuple[Tensor, ...]:
        batch, length, width = h.shape
        packed = torch.mm(h.reshape(-1, width), weight.T)
        packed = packed.view(batch, length, 3, heads, width // heads)
        q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
        _turn_kernel[(batch * length,)](
            q, k, v, packed, cos, sin, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            packed.stride(1), length, HEADS=heads, HALF=width // heads // 2, SIGN=1.0,
            COPY_V=False, **_blocks(heads, width // heads // 2),
        )  # fmt: skip
        ctx.save_for_backward(h, weight, cos, sin)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, cos, sin = ctx.saved_tensors
        batch, length, width = h.shape
        # Whatever their layout, the features of a head lie side by side.
        d_q, d_k, d_v = (d if d.stride(-1) == 1 else d.contiguous() for d in upstream)
        heads = d_q.shape[1]
        packed = torch.empty(batch, length, 3 * width, dtype=d_q.dtype, device=d_q.device)
        _turn_kernel[(batch * length,)](
            d_q, d_k, d_v, packed, cos, sin, *d_q.stride()[:3], *d_k.stride()[:3],
            *d_v.stride()[:3], packed.stride(1), length, HEADS=heads, HALF=width // heads // 2,
            SIGN=-1.0, COPY_V=True, **_blocks(heads, width // heads // 2),
        )  # fmt: skip
        flat = packed.view(-1, 3 * width)
        d_h = torch.mm(flat, weight) if ctx.needs_input_grad[0] else None
        d_weight = torch.mm(flat.T, h.reshape(-1, width)) if ctx.needs_input_grad[1] else None
        return None if d_h is None else d_h.view_as(h), d_weight, None, None, None


def _blocks(heads: int, half: int) -> dict[str, int]:
    return {
        "BLOCK_H": triton.next_power_of_2(heads),
        "BLOCK_D": triton.next_power_of_2(half),
        "num_warps": 2,
    }


@triton.jit
def _turn_kernel(
    q_ptr, k_ptr, v_ptr, packed_ptr, cos_ptr, sin_ptr, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l,
    row, length, HEADS: tl.constexpr, HALF: tl.constexpr, SIGN: tl.constexpr,
    COPY_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Features (i, i + HALF) of every head of one token's q and k, turned into its packed row."""
    position, entry = tl.program_id(0) % length, (tl.program_id(0) // length).to(tl.int64)
    head, i = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None]
    inside = (head < HEADS) & (i < HALF)
    cos = tl.load(cos_ptr + position * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + i, mask=i < HALF, other=0.0) * SIGN
    out = packed_ptr + (entry * length + position) * row + head * (2 * HALF) + i
    q = q_ptr + entry * q_b + position.to(tl.int64) * q_l + head * q_h + i
    k = k_ptr + entry * k_b + position.to(tl.int64) * k_l + head * k_h + i
    _turn(q, out, cos, sin, inside, HALF)
    _turn(k, out + HEADS * 2 * HALF, cos, sin, inside, HALF)
    if COPY_V:
        v = v_ptr + entry * v_b + position.to(tl.int64) * v_l + head * v_h + i
        out_v = out + 2 * HEADS * 2 * HALF
        tl.store(out_v, tl.load(v, mask=inside, other=0.0), mask=inside)
        tl.store(out_v + HALF, tl.load(v + HALF, mask=inside, other=0.0), mask=inside)


@triton.jit
def _turn(source, target, cos, sin, inside, HALF: tl.constexpr):
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(target + HALF, (second * cos + first * sin).to(kind), mask=inside)
