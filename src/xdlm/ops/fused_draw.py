"""Exact draws on a GPU: the distribution function of a row inverted by one Triton program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xdlm.ops.blocks import Head
from xdlm.ops.device import given_or
from xdlm.ops.fused import load_logits
from xdlm.ops.fused_product import TILE, Sums


def fused_draw_and_weigh(
    logits: Tensor,
    sums: Sums,
    head: Head,
    uniform: Tensor,
    z: Tensor,
    count: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """As `draw_and_weigh`, from `logits` [R, padded V] and what their tiles add up to; `head` is prepared.
    Where `uniform` is negative nothing is drawn, and the token is 0. With a `count` on the GPU, row i is
    looked at if `first + i` is below it; the others come out as anything."""
    rows, tiles = sums.top.shape
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    p_z = torch.empty(rows, dtype=torch.float64, device=logits.device)
    if rows:
        _draw_kernel[(rows,)](
            logits, *sums, head.bias, uniform.contiguous(), z.contiguous(), drawn, p_z,
            given_or(count, z), first, logits.stride(0), head.size, tiles, width=logits.shape[1],
            COUNTED=count is not None, TILES=triton.next_power_of_2(tiles), TOKENS=TILE, num_warps=4,
        )  # fmt: skip
    return drawn, p_z


@triton.jit(do_not_specialize=["first"])
def _draw_kernel(
    logits_ptr, top_ptr, mass_ptr, bias_ptr, uniform_ptr, z_ptr, drawn_ptr, p_z_ptr, count_ptr,
    first, stride, size, tiles, width: tl.constexpr, COUNTED: tl.constexpr, TILES: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Running sums of tiles in float64 pick a tile, running sums inside it the token."""
    row = tl.program_id(0).to(tl.int64)
    wanted = True
    if COUNTED:
        wanted = first + row < tl.load(count_ptr)
    if wanted:
        row_ptr = logits_ptr + row * stride
        tile = tl.arange(0, TILES)
        top = tl.load(top_ptr + row * tiles + tile, mask=tile < tiles, other=-3.0e38)
        mass = tl.load(mass_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
        unit = tl.floor(tl.max(top, 0))
        through = tl.cumsum(_power(top - unit) * mass.to(tl.float64), 0)
        total = tl.max(through, 0)
        at_z = load_logits(row_ptr, bias_ptr, tl.load(z_ptr + row), width)
        tl.store(p_z_ptr + row, _power(at_z - unit) / total)
        uniform = tl.load(uniform_ptr + row)
        found = 0
        if uniform >= 0:
            target = uniform * total
            # The first tile, and in it the first token, whose running sum exceeds the target: never one of
            # zero probability.
            chosen = tl.sum((through <= target).to(tl.int32), 0)
            before = tl.max(tl.where(tile < chosen, through, 0.0), 0)
            after = tl.min(tl.where(tile < chosen, total, through), 0)
            token = chosen * TOKENS + tl.arange(0, TOKENS)
            running = tl.cumsum(_power(load_logits(row_ptr, bias_ptr, token, width) - unit), 0)
            # A tile's sum has float32's precision. As a share of it the target lies where it should among
            # the tokens, the rarest included.
            share = (target - before) / (after - before)
            rest = tl.minimum(share, 1 - 2.220446049250313e-16) * tl.max(running, 0)
            found = chosen * TOKENS + tl.sum((running <= rest).to(tl.int32), 0)
        # Where a model gives nothing but NaN, any token will do, but it must be one.
        tl.store(drawn_ptr + row, tl.minimum(found, size - 1).to(tl.int64))


@triton.jit
def _power(value):
    """2^value in float64, zero below 2^-1000. A token's mass has the same bits wherever it is added up.

    With the nearest whole number n, 2^(value - n) is taken to float32's precision, and its bits are moved
    to where float64 has them; n goes into the exponent. (Instructions that round and convert are slow.)
    """
    there = value > -1000.0
    value = tl.where(there, value, 0.0)
    # 1.5 x 2^23: the last bit is worth 1, so that n is in the lowest bits
    shifted = value + 12582912.0
    part = tl.exp2(value - (shifted - 12582912.0)).to(tl.int32, bitcast=True).to(tl.int64)
    n = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    power = ((part << 29) + ((n + 896).to(tl.int64) << 52)).to(tl.float64, bitcast=True)
    return tl.where(there, power, 0.0)
