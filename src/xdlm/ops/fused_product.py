"""Logits of rows, and the mass of each tile of the vocabulary, in one Triton kernel.

A library's product leaves logits in memory, and a sum over the vocabulary then reads all of them. Here the
sums are taken while a tile of logits is still in registers. Programs stay on the GPU and take one tile
after the other, so that the loads of the next one run beside the sums of this one. Where nobody will read
the logits, they are not written; and the number of rows may be one that only the GPU knows: tiles behind it
cost nothing.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from xdlm.ops.blocks import Head
from xdlm.ops.device import given_or, multiprocessors

_ROWS, _FEATURES = 128, 64
#: Tokens of a tile; it is stored in four parts, which leaves room for four pairs of loads on their way.
TILE = 256
_QUARTER = TILE // 4
#: Where logits are not stored, sums are of so many tokens: who draws computes as many once more.
PART = 64
_STAGES = 4
#: Bytes of shared memory that a program takes: pairs of tiles on their way, a part of a tile of logits, and
#: some more for what a compiler adds.
_SHARED = _STAGES * (_ROWS + TILE) * _FEATURES * 2 + _ROWS * _QUARTER * 4 + 2048


class Sums(NamedTuple):
    """What tiles of the vocabulary, or parts of them, add up to, [R, parts] each, in units of log 2: the
    highest logit, and `sum 2^(logit - highest)`."""

    top: Tensor
    mass: Tensor


def can_multiply(hidden: Tensor, weight: Tensor) -> bool:
    """Whether this GPU has the memory, and these the layout, that the kernel needs. Float32 is left to the
    library: the kernel would do it without tensor cores."""
    if hidden.dtype != weight.dtype or not (_can_copy(hidden) and _can_copy(weight)):
        return False
    if not hidden.is_cuda:  # interpreted
        return True
    return hidden.dtype in (torch.bfloat16, torch.float16) and _has_room(hidden.device)


def _can_copy(source: Tensor) -> bool:
    """Whether rows lie as the engine that copies tiles wants them: one behind the other, each at a multiple
    of 16 bytes."""
    start, step = source.data_ptr(), source.stride(0) * source.itemsize
    apart = source.stride(-1) == 1 and source.stride(0) >= source.shape[1]
    return apart and start % 16 == 0 and step % 16 == 0


@cache
def _has_room(device: torch.device) -> bool:
    """For tiles of this size, and an engine that copies them: both came with Hopper."""
    index = torch.cuda.current_device() if device.index is None else device.index
    shared = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return torch.cuda.get_device_capability(index)[0] >= 9 and shared >= _SHARED


def product_with_sums(
    hidden: Tensor, head: Head, out: Tensor | None, count: Tensor | None = None
) -> Sums:
    """Logits in units of log 2 into `out` [R, padded V], and what they add up to; `head` is prepared.
    With a `count` on the GPU, of so many rows; of others the sums are anything."""
    rows, width = hidden.shape
    down, across = triton.cdiv(rows, _ROWS), triton.cdiv(len(head.weight), TILE)
    parts = 1 if out is not None else TILE // PART
    top, mass = torch.empty(2, rows, across * parts, device=hidden.device)
    if rows:
        source = TensorDescriptor.from_tensor(hidden, [_ROWS, _FEATURES])
        _product_kernel[(min(down * across, multiprocessors(hidden)),)](
            source, TensorDescriptor.from_tensor(head.weight, [TILE, _FEATURES]),
            source if out is None else TensorDescriptor.from_tensor(out, [_ROWS, _QUARTER]),
            head.bias, top, mass, given_or(count, top), rows, len(head.weight), down, across,
            WIDTH=width, STORED=out is not None, COUNTED=count is not None, ROWS=_ROWS, TOKENS=TILE,
            PARTS=parts, FEATURES=_FEATURES, num_warps=8, num_stages=_STAGES,
        )  # fmt: skip
    return Sums(top, mass)


@triton.jit(do_not_specialize=["rows", "down"])
def _product_kernel(
    hidden, weight, out, bias_ptr, top_ptr, mass_ptr, count_ptr, rows, n_tokens, down, across,
    WIDTH: tl.constexpr, STORED: tl.constexpr, COUNTED: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Tiles of the same tokens come one after the other: each weight is read once. While a part of a tile
    is on its way to memory, it is summed: the next part waits for the same room."""
    wanted = rows
    if COUNTED:
        wanted = tl.minimum(rows, tl.load(count_ptr).to(tl.int32))
        down = tl.cdiv(wanted, ROWS)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        start, column = tile % down * ROWS, tile // down
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        for done in range(0, WIDTH, FEATURES):
            left = hidden.load([start, done])
            right = weight.load([column * TOKENS, done])
            total = tl.dot(left, right.T, total, input_precision="ieee")
        token = column * TOKENS + tl.arange(0, TOKENS)
        bias = tl.load(bias_ptr + token, mask=token < n_tokens, other=-float("inf"))
        value = tl.fma(total, 1.4426950408889634, tl.broadcast_to(bias[None], (ROWS, TOKENS)))
        if STORED:
            part_0, part_1, part_2, part_3 = _quarters(value)
            QUARTER: tl.constexpr = TOKENS // 4
            out.store([start, column * TOKENS], part_0)
            top_0, mass_0 = tile_sums(part_0)
            out.store([start, column * TOKENS + QUARTER], part_1)
            top_1, mass_1 = tile_sums(part_1)
            out.store([start, column * TOKENS + 2 * QUARTER], part_2)
            top_2, mass_2 = tile_sums(part_2)
            out.store([start, column * TOKENS + 3 * QUARTER], part_3)
            top_3, mass_3 = tile_sums(part_3)
            top_a, mass_a = _both_sums(top_0, mass_0, top_1, mass_1)
            top_b, mass_b = _both_sums(top_2, mass_2, top_3, mass_3)
            top, mass = _both_sums(top_a, mass_a, top_b, mass_b)
        else:
            top, mass = tile_sums(tl.reshape(value, (ROWS * PARTS, TOKENS // PARTS)))
        part = tl.arange(0, ROWS * PARTS)
        row = start + part // PARTS
        place = (row.to(tl.int64) * across + column) * PARTS + part % PARTS
        tl.store(top_ptr + place, top, mask=row < wanted)
        tl.store(mass_ptr + place, mass, mask=row < wanted)


@triton.jit
def tile_sums(value):
    """Of tiles [T, tokens]: the highest value, and `sum 2^(value - highest)`. The first is finite, so that
    a tile without ordinary tokens has a mass of 0."""
    top = tl.maximum(tl.max(value, 1), -3.0e38)
    return top, tl.sum(tl.exp2(value - top[:, None]), 1)


@triton.jit
def _both_sums(top_a, mass_a, top_b, mass_b):
    """Of two parts of the same rows."""
    top = tl.maximum(top_a, top_b)
    return top, mass_a * tl.exp2(top_a - top) + mass_b * tl.exp2(top_b - top)


@triton.jit
def _quarters(value):
    """Of tiles [T, tokens], along the tokens."""
    lower, upper = _halves(value)
    one, two = _halves(lower)
    three, four = _halves(upper)
    return one, two, three, four


@triton.jit
def _halves(value):
    rows: tl.constexpr = value.shape[0]
    tokens: tl.constexpr = value.shape[1]
    return tl.split(tl.permute(tl.reshape(value, (rows, 2, tokens // 2)), (0, 2, 1)))
