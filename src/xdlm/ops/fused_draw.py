"""Exact draws on a GPU: the distribution function of a row inverted by one Triton program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xdlm.ops.blocks import Head
from xdlm.ops.fused import load_logits

_BLOCK = 4096


def fused_draw_and_weigh(
    logits: Tensor, head: Head, uniform: Tensor, z: Tensor
) -> tuple[Tensor, Tensor]:
    """As `draw_and_weigh`, in two readings of each row; `logits` [R, padded V] and `head` are prepared."""
    rows = len(logits)
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    p_z = torch.empty(rows, dtype=torch.float64, device=logits.device)
    if rows:
        width = logits.shape[1]
        n_blocks = triton.next_power_of_2(triton.cdiv(width, _BLOCK))
        _draw_kernel[(rows,)](
            logits, head.bias, uniform.contiguous(), z.contiguous(), drawn, p_z, logits.stride(0),
            width, N_BLOCKS=n_blocks, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return drawn, p_z


@triton.jit
def _draw_kernel(
    logits_ptr, bias_ptr, uniform_ptr, z_ptr, drawn_ptr, p_z_ptr, stride, width: tl.constexpr,
    N_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of blocks in float64 pick a block, a running sum inside it picks the token.

    A block's masses are relative to its own highest logit, so that one reading finds all sums.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    lanes = tl.arange(0, BLOCK)
    blocks = tl.arange(0, N_BLOCKS)
    tops = tl.full((N_BLOCKS,), -float("inf"), tl.float32)
    sums = tl.zeros((N_BLOCKS,), tl.float64)
    for start in range(0, width, BLOCK):
        value = load_logits(row_ptr, bias_ptr, start + lanes, width)
        top = tl.max(value, 0)
        this = blocks == start // BLOCK
        tops = tl.where(this, top, tops)
        sums = tl.where(this, tl.sum(_masses(value, top), 0), sums)
    highest = tl.max(tops, 0)
    relative = tl.exp2((tops - highest).to(tl.float64))
    through = tl.cumsum(sums * relative, 0)
    total = tl.max(through, 0)
    target = tl.load(uniform_ptr + row) * total
    # The first block, and in it the first token, whose running sum exceeds the target: never one of
    # zero probability.
    block = tl.sum((through <= target).to(tl.int32), 0)
    before = tl.max(tl.where(blocks < block, through, 0.0), 0)
    factor = tl.max(tl.where(blocks == block, relative, 0.0), 0)
    top = tl.max(tl.where(blocks == block, tops, -float("inf")), 0)
    value = load_logits(row_ptr, bias_ptr, block * BLOCK + lanes, width)
    running = tl.cumsum(_masses(value, top), 0)
    # The two sums round differently; keep the target inside the block's own total.
    rest = tl.minimum((target - before) / factor, tl.max(running, 0) * (1 - 2.220446049250313e-16))
    tl.store(
        drawn_ptr + row, (block * BLOCK + tl.sum((running <= rest).to(tl.int32), 0)).to(tl.int64)
    )
    at_z = load_logits(row_ptr, bias_ptr, tl.load(z_ptr + row), width)
    tl.store(p_z_ptr + row, tl.exp2(at_z - highest).to(tl.float64) / total)


@triton.jit
def _masses(value, top):
    """2^(value - top) in float64; all zero where there is nothing to draw."""
    return tl.where(value > -float("inf"), tl.exp2(value - top), 0.0).to(tl.float64)
