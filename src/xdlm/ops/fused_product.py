"""A product of rows with the head's weights whose number of rows only the GPU knows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS, _TOKENS, _FEATURES = 128, 128, 64


def counted_product(
    hidden: Tensor, weight: Tensor, out: Tensor, count: Tensor, first: int
) -> Tensor:
    """`hidden @ weight.T` into `out` [R, V]: row i for `first + i < count`, a number on the GPU. Tiles
    without such rows cost nothing, and what is in theirs of `out` stays."""
    rows, width = hidden.shape
    tiles = triton.cdiv(rows, _ROWS)
    _product_kernel[(tiles * triton.cdiv(len(weight), _TOKENS),)](
        hidden, weight, out, count, first, rows, len(weight), tiles, hidden.stride(0),
        weight.stride(0), out.stride(0), WIDTH=width, ROWS=_ROWS, TOKENS=_TOKENS,
        FEATURES=_FEATURES, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first", "rows", "tiles"])
def _product_kernel(
    hidden_ptr, weight_ptr, out_ptr, count_ptr, first, rows, n_tokens, tiles,
    hidden_stride, weight_stride, out_stride, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """A tile of the result. Tiles of the same tokens come one after the other: each weight is read once."""
    start = tl.program_id(0) % tiles * ROWS
    if first + start < tl.load(count_ptr):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        token = (tl.program_id(0) // tiles * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        feature = tl.arange(0, FEATURES)
        row_there, token_there = (row < rows)[:, None], (token < n_tokens)[:, None]
        from_hidden = hidden_ptr + row[:, None] * hidden_stride
        from_weight = weight_ptr + token[:, None] * weight_stride
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        for done in range(0, WIDTH, FEATURES):
            at = done + feature
            inside = (at < WIDTH)[None]
            left = tl.load(from_hidden + at[None], mask=row_there & inside, other=0.0)
            right = tl.load(from_weight + at[None], mask=token_there & inside, other=0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        place = out_ptr + row[:, None] * out_stride + token[None]
        tl.store(place, total, mask=row_there & (token < n_tokens)[None])
