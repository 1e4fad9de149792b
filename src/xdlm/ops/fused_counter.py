"""Philox in one Triton kernel: the same bits as `counter.philox`, without its hundred small steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def fused_uniform(key: tuple[int, int], counter: tuple[Tensor, ...]) -> Tensor:
    """Float64 in [0, 1) from four int64 tensors of 32-bit words, broadcast together."""
    words = [word.contiguous() for word in torch.broadcast_tensors(*counter)]
    out = torch.empty(words[0].shape, dtype=torch.float64, device=words[0].device)
    n = out.numel()
    if n:
        _uniform_kernel[(triton.cdiv(n, 1024),)](*words, out, *key, n, BLOCK=1024)
    return out


@triton.jit(do_not_specialize=["key0", "key1", "n"])
def _uniform_kernel(c0_ptr, c1_ptr, c2_ptr, c3_ptr, out_ptr, key0, key1, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    c0 = tl.load(c0_ptr + at, mask=inside, other=0).to(tl.uint32)
    c1 = tl.load(c1_ptr + at, mask=inside, other=0).to(tl.uint32)
    c2 = tl.load(c2_ptr + at, mask=inside, other=0).to(tl.uint32)
    c3 = tl.load(c3_ptr + at, mask=inside, other=0).to(tl.uint32)
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
    tl.store(out_ptr + at, bits.to(tl.float64) * 1.1102230246251565e-16, mask=inside)
