"""Exact draws on a GPU: the distribution function of a row inverted by one Triton program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xdlm.ops.blocks import Head
from xdlm.ops.device import given_or
from xdlm.ops.doubts import Doubts
from xdlm.ops.fused_product import PART, TILE, Sums

#: Of a state that are multiplied at a time.
_FEATURES = 64


def fused_draw_and_weigh(
    logits: Tensor, sums: Sums, head: Head, uniform: Tensor, z: Tensor
) -> tuple[Tensor, Tensor]:
    """As `draw_and_weigh`, from `logits` [R, padded V] and what their tiles add up to; `head` is prepared.
    Where `uniform` is negative nothing is drawn, and the token is 0."""
    return _draw(logits, sums, head, uniform, z, None, None)


def fused_draw_counted(
    hidden: Tensor, sums: Sums, head: Head, uniform: Tensor, doubts: Doubts | None, count: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of the first `count` rows, a number on the GPU, without logits: those of the part of a tile
    that is drawn from are computed once more. Where there are doubts, they tell the logit of z, and where
    `log p(z)` reaches the bar nothing is drawn either; where there are none, nobody asks for p(z)."""
    return _draw(hidden, sums, head, uniform, None, doubts, count)


def _draw(
    source: Tensor,
    sums: Sums,
    head: Head,
    uniform: Tensor,
    z: Tensor | None,
    doubts: Doubts | None,
    count: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, tiles = sums.top.shape
    drawn = torch.empty(rows, dtype=torch.int64, device=source.device)
    p_z = torch.empty(rows, dtype=torch.float64, device=source.device)
    logit, bar = (None, None) if doubts is None else doubts
    if rows:
        _draw_kernel[(rows,)](
            source, head.weight, head.bias, *sums, uniform.contiguous(), given_or(z, drawn).contiguous(),
            given_or(logit, sums.top), given_or(bar, sums.top), given_or(count, drawn), drawn, p_z,
            source.stride(0), head.weight.stride(0), head.size, tiles, len(head.weight),
            WIDTH=source.shape[1], STORED=count is None, IN_DOUBT=doubts is not None,
            TILES=triton.next_power_of_2(tiles), TOKENS=TILE if count is None else PART,
            FEATURES=_FEATURES, num_warps=4,
        )  # fmt: skip
    return drawn, p_z


@triton.jit
def _draw_kernel(
    source_ptr, weight_ptr, bias_ptr, top_ptr, mass_ptr, uniform_ptr, z_ptr, logit_ptr, bar_ptr,
    count_ptr, drawn_ptr, p_z_ptr, stride, weight_stride, size, tiles, n_tokens, WIDTH: tl.constexpr,
    STORED: tl.constexpr, IN_DOUBT: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    """Running sums of tiles in float64 pick a tile, running sums inside it the token. Rows of `source` are
    logits where they are STORED, else hidden states."""
    row = tl.program_id(0).to(tl.int64)
    wanted = True
    if not STORED:
        wanted = row < tl.load(count_ptr)
    if wanted:
        row_ptr = source_ptr + row * stride
        tile = tl.arange(0, TILES)
        top = tl.load(top_ptr + row * tiles + tile, mask=tile < tiles, other=-3.0e38)
        mass = tl.load(mass_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
        unit = tl.floor(tl.max(top, 0))
        mass_of_tile = _power(top - unit) * mass.to(tl.float64)
        uniform = tl.load(uniform_ptr + row)
        drawing = uniform >= 0
        if STORED or IN_DOUBT:
            if STORED:
                z = tl.load(z_ptr + row) + tl.zeros((1,), tl.int64)
                at_z = tl.load(row_ptr + z, mask=z < n_tokens, other=-float("inf"))
            else:
                at_z = tl.load(logit_ptr + row + tl.zeros((1,), tl.int64)) * 1.4426950408889634
            p_z = tl.max(_power(at_z - unit), 0) / tl.sum(mass_of_tile, 0)
            tl.store(p_z_ptr + row, p_z)
            if IN_DOUBT:
                drawing = drawing & (p_z < tl.exp(tl.load(bar_ptr + row).to(tl.float64)))
        found = 0
        if drawing:
            through = tl.cumsum(mass_of_tile, 0)
            total = tl.max(through, 0)
            target = uniform * total
            # The first tile, and in it the first token, whose running sum exceeds the target: never one of
            # zero probability.
            chosen = tl.sum((through <= target).to(tl.int32), 0)
            before = tl.max(tl.where(tile < chosen, through, 0.0), 0)
            after = tl.min(tl.where(tile < chosen, total, through), 0)
            token = (chosen * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
            value = _logits(row_ptr, weight_ptr, bias_ptr, token, weight_stride, n_tokens, WIDTH, STORED,
                            FEATURES)  # fmt: skip
            running = tl.cumsum(_power(value - unit), 0)
            # A tile's sum has float32's precision. As a share of it the target lies where it should among
            # the tokens, the rarest included.
            share = (target - before) / (after - before)
            rest = tl.minimum(share, 1 - 2.220446049250313e-16) * tl.max(running, 0)
            found = chosen * TOKENS + tl.sum((running <= rest).to(tl.int32), 0)
        # Where a model gives nothing but NaN, any token will do, but it must be one.
        tl.store(drawn_ptr + row, tl.minimum(found, size - 1).to(tl.int64))


@triton.jit
def _logits(
    row_ptr, weight_ptr, bias_ptr, token, weight_stride, n_tokens, WIDTH: tl.constexpr,
    STORED: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Of some tokens in units of log 2, read or computed; -inf where there is no ordinary token."""
    inside = token < n_tokens
    if STORED:
        value = tl.load(row_ptr + token, mask=inside, other=-float("inf"))
    else:
        product = tl.zeros(token.shape, tl.float32)
        for start in range(0, WIDTH, FEATURES):
            feature = start + tl.arange(0, FEATURES)
            there = feature < WIDTH
            state = tl.load(row_ptr + feature, mask=there, other=0.0).to(tl.float32)
            place = weight_ptr + token[:, None] * weight_stride + feature[None]
            weight = tl.load(place, mask=inside[:, None] & there[None], other=0.0).to(tl.float32)
            product += tl.sum(weight * state[None], 1)
        bias = tl.load(bias_ptr + token, mask=inside, other=-float("inf"))
        value = tl.fma(product, 1.4426950408889634, bias)
    return value


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
