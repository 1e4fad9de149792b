"""Philox in one Triton kernel: the same bits as `counter.philox`, without its hundred small steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def fused_uniform(seed: int, stream: int, sample: Tensor, position: Tensor, step: int) -> Tensor:
    """As `counter.uniform`, for indices that broadcast to at most two dimensions, or any number of
    them if they are equal in shape."""
    sample, position = torch.broadcast_tensors(sample, position)
    out = torch.empty(sample.shape, dtype=torch.float64, device=sample.device)
    if sample.ndim > 2:
        sample, position = sample.flatten(), position.flatten()
    rows, columns = sample.shape if sample.ndim == 2 else (1, sample.numel())
    strides = [
        stride
        for index in (sample, position)
        for stride in (index.stride() if index.ndim == 2 else (0, *index.stride()))
    ]
    if out.numel():
        grid = (rows, triton.cdiv(columns, _BLOCK))
        _uniform_kernel[grid](
            sample, position, out, *(strides if sample.ndim else (0, 0, 0, 0)), columns,
            step & 0xFFFFFFFF, stream << 24, seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF,
            BLOCK=_BLOCK,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["columns", "step", "stream", "key0", "key1"])
def _uniform_kernel(
    sample_ptr, position_ptr, out_ptr, sample_row, sample_column, position_row, position_column,
    columns, step, stream, key0, key1, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    sample = tl.load(sample_ptr + row * sample_row + column * sample_column, mask=inside, other=0)
    position = tl.load(
        position_ptr + row * position_row + column * position_column, mask=inside, other=0
    )
    high = ((sample >> 32) & 0xFFFFFF).to(tl.uint32) | stream.to(tl.uint32)
    zero = tl.zeros((BLOCK,), tl.uint32)
    uniform = philox_uniform(
        position.to(tl.uint32), sample.to(tl.uint32), zero + step.to(tl.uint32), high, key0, key1
    )
    tl.store(out_ptr + row * columns + column, uniform, mask=inside)


@triton.jit
def philox_uniform(c0, c1, c2, c3, key0, key1):
    """Float64 in [0, 1) from ten rounds on four 32-bit words: `counter.philox` and its 53 bits."""
    k0 = key0.to(tl.uint32)
    k1 = key1.to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (p1 >> 32).to(tl.uint32) ^ c1 ^ k0,
            p1.to(tl.uint32),
            (p0 >> 32).to(tl.uint32) ^ c3 ^ k1,
            p0.to(tl.uint32),
        )
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    bits = (c0.to(tl.uint64) << 21) | (c1.to(tl.uint64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16
