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
    """Sums of blocks in float64 pick a block, a running sum inside it picks the token."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, width, BLOCK):
        top = tl.maximum(top, load_logits(row_ptr, bias_ptr, start + lanes, width))
    highest = tl.max(top, 0)
    blocks = tl.arange(0, N_BLOCKS)
    sums = tl.zeros((N_BLOCKS,), tl.float64)
    for start in range(0, width, BLOCK):
        mass = tl.exp(load_logits(row_ptr, bias_ptr, start + lanes, width) - highest)
        sums = tl.where(blocks == start // BLOCK, tl.sum(mass.to(tl.float64), 0), sums)
    through = tl.cumsum(sums, 0)
    total = tl.max(through, 0)
    target = tl.load(uniform_ptr + row) * total
    # The first block, and in it the first token, whose running sum exceeds the target: never one of
    # zero probability.
    block = tl.sum((through <= target).to(tl.int32), 0)
    before = tl.max(tl.where(blocks < block, through, 0.0), 0)
    token = block * BLOCK + lanes
    mass = tl.exp(load_logits(row_ptr, bias_ptr, token, width) - highest).to(tl.float64)
    running = tl.cumsum(mass, 0)
    # The two sums round differently; keep the target inside the block's own total.
    rest = tl.minimum(target - before, tl.max(running, 0) * (1 - 2.220446049250313e-16))
    tl.store(
        drawn_ptr + row, (block * BLOCK + tl.sum((running <= rest).to(tl.int32), 0)).to(tl.int64)
    )
    at_z = load_logits(row_ptr, bias_ptr, tl.load(z_ptr + row), width)
    tl.store(p_z_ptr + row, tl.exp(at_z - highest).to(tl.float64) / total)
