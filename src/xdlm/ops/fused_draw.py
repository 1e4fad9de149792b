"""Exact draws on a GPU: the distribution function of a row inverted by one Triton program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xdlm.ops.blocks import Head
from xdlm.ops.device import given_or
from xdlm.ops.fused import load_logits

#: Tokens of each block that a program reads at a time; a block's size is a multiple of it.
_LANES = 128


def fused_draw_and_weigh(
    logits: Tensor,
    head: Head,
    uniform: Tensor,
    z: Tensor,
    count: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """As `draw_and_weigh`, in one reading of each row; `logits` [R, padded V] and `head` are prepared.
    Where `uniform` is negative nothing is drawn, and the token is 0. With a `count` on the GPU, row i is
    looked at if `first + i` is below it; the others come out as anything."""
    rows = len(logits)
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    p_z = torch.empty(rows, dtype=torch.float64, device=logits.device)
    if rows:
        width = logits.shape[1]
        n_blocks = 16 if width <= 1 << 16 else 32
        block = triton.cdiv(triton.cdiv(width, n_blocks), _LANES) * _LANES
        _draw_kernel[(rows,)](
            logits, head.bias, uniform.contiguous(), z.contiguous(), drawn, p_z,
            given_or(count, z), first, logits.stride(0), head.size, width,
            COUNTED=count is not None, N_BLOCKS=n_blocks, BLOCK=block, SPAN=triton.next_power_of_2(block),
            LANES=_LANES, num_warps=8,
        )  # fmt: skip
    return drawn, p_z


@triton.jit(do_not_specialize=["first"])
def _draw_kernel(
    logits_ptr, bias_ptr, uniform_ptr, z_ptr, drawn_ptr, p_z_ptr, count_ptr, first, stride, size,
    width: tl.constexpr, COUNTED: tl.constexpr, N_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if COUNTED:
        if first + row < tl.load(count_ptr):
            _draw(logits_ptr, bias_ptr, uniform_ptr, z_ptr, drawn_ptr, p_z_ptr, row, stride, size,
                  width, N_BLOCKS, BLOCK, SPAN, LANES)  # fmt: skip
    else:
        _draw(logits_ptr, bias_ptr, uniform_ptr, z_ptr, drawn_ptr, p_z_ptr, row, stride, size,
              width, N_BLOCKS, BLOCK, SPAN, LANES)  # fmt: skip


@triton.jit
def _draw(
    logits_ptr, bias_ptr, uniform_ptr, z_ptr, drawn_ptr, p_z_ptr, row, stride, size,
    width: tl.constexpr, N_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Sums of blocks in float64 pick a block, a running sum inside it picks the token."""
    row_ptr = logits_ptr + row * stride
    # Float64 reaches from 2^-1022 to 2^1023, so that logits of any sensible size need no other unit.
    unit = 0.0
    sums, top = _block_sums(row_ptr, bias_ptr, unit, width, N_BLOCKS, BLOCK, LANES)
    if ((top > 900.0) | (top < -500.0)) & (top > -float("inf")):
        unit = tl.floor(top)
        sums, top = _block_sums(row_ptr, bias_ptr, unit, width, N_BLOCKS, BLOCK, LANES)
    through = tl.cumsum(sums, 0)
    total = tl.max(through, 0)
    at_z = load_logits(row_ptr, bias_ptr, tl.load(z_ptr + row), width)
    tl.store(p_z_ptr + row, _mass(at_z - unit) / total)
    uniform = tl.load(uniform_ptr + row)
    if uniform < 0:
        tl.store(drawn_ptr + row, 0)
    else:
        target = uniform * total
        # The first block, and in it the first token, whose running sum exceeds the target: never one of
        # zero probability.
        blocks = tl.arange(0, N_BLOCKS)
        block = tl.sum((through <= target).to(tl.int32), 0)
        before = tl.max(tl.where(blocks < block, through, 0.0), 0)
        offset = tl.arange(0, SPAN)
        token = tl.where(offset < BLOCK, block * BLOCK + offset, width)
        running = tl.cumsum(_mass(load_logits(row_ptr, bias_ptr, token, width) - unit), 0)
        # The two sums round differently; keep the target inside the block's own total.
        rest = tl.minimum(target - before, tl.max(running, 0) * (1 - 2.220446049250313e-16))
        found = block * BLOCK + tl.sum((running <= rest).to(tl.int32), 0)
        # Where a model gives nothing but NaN, any token will do, but it must be one.
        tl.store(drawn_ptr + row, tl.minimum(found, size - 1).to(tl.int64))


@triton.jit
def _block_sums(
    row_ptr, bias_ptr, unit, width: tl.constexpr, N_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """The mass of each block, and the highest logit. All blocks advance together, so that what is added
    up across lanes is added up once, at the end."""
    sums = tl.zeros((N_BLOCKS, LANES), tl.float64)
    top = tl.full((N_BLOCKS, LANES), -float("inf"), tl.float32)
    token = tl.arange(0, N_BLOCKS)[:, None] * BLOCK + tl.arange(0, LANES)[None]
    for start in range(0, BLOCK, LANES):
        value = load_logits(row_ptr, bias_ptr, token + start, width)
        top = tl.maximum(top, value)
        sums += _mass(value - unit)
    return tl.sum(sums, 1), tl.max(tl.max(top, 1), 0)


@triton.jit
def _mass(value):
    """2^value in float64, zero below 2^-1000. A token's mass has the same bits wherever it is added up.

    With the nearest whole number n, 2^(value - n) is taken to float32's precision, and its bits are moved
    to where float64 has them; n goes into the exponent. (Instructions that round and convert are slow.)
    """
    there = value > -1000.0
    value = tl.where(there, value, 0.0)
    shifted = (
        value + 12582912.0
    )  # 1.5 x 2^23: the last bit is worth 1, so that n is in the lowest bits
    part = tl.exp2(value - (shifted - 12582912.0)).to(tl.int32, bitcast=True).to(tl.int64)
    n = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    mass = ((part << 29) + ((n + 896).to(tl.int64) << 52)).to(tl.float64, bitcast=True)
    return tl.where(there, mass, 0.0)
