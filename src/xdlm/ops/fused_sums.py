"""What is left to do to logits where a library has multiplied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xdlm.ops.blocks import Head
from xdlm.ops.fused_product import TILE, Sums, tile_sums

#: Tiles that a program reads at a time.
_TILES = 8


def finish_logits(logits: Tensor, head: Head) -> Sums:
    """Adds the bias to products [R, padded V], in place and in units of log 2, and gives what tiles of the
    vocabulary add up to; `head` is prepared."""
    rows, width = logits.shape
    tiles = triton.cdiv(width, TILE)
    top, mass = torch.empty(2, rows, tiles, device=logits.device)
    if rows:
        _finish_kernel[(rows, triton.cdiv(tiles, _TILES))](
            logits, head.bias, top, mass, logits.stride(0), width, tiles, TOKENS=TILE, TILES=_TILES,
            num_warps=8,
        )  # fmt: skip
    return Sums(top, mass)


@triton.jit
def _finish_kernel(
    logits_ptr, bias_ptr, top_ptr, mass_ptr, stride, width, tiles,
    TOKENS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    token = tile[:, None] * TOKENS + tl.arange(0, TOKENS)[None]
    logits = tl.load(logits_ptr + row * stride + token, mask=token < width, other=0.0)
    bias = tl.load(bias_ptr + token, mask=token < width, other=-float("inf"))
    value = tl.fma(logits, 1.4426950408889634, bias)
    tl.store(logits_ptr + row * stride + token, value, mask=token < width)
    top, mass = tile_sums(value)
    tl.store(top_ptr + row * tiles + tile, top, mask=tile < tiles)
    tl.store(mass_ptr + row * tiles + tile, mass, mask=tile < tiles)
