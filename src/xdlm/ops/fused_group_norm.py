"""The group norm of a U-Net with what stands before and behind it, in a few Triton kernels.

    y = swish(group_norm(x + shift) * weight + bias),   shift one number for each image and channel

Images lie in memory with the channels of a pixel side by side, as fast convolutions want them; torch's own
norm would turn them round and back on a GPU. A program has a tile of pixels and channels. Moments are of
tiles first, as mean and sum of squared deviations, and are put together per group, so that nothing large is
subtracted from anything large. The backward pass reads each tensor twice: once for the sums over pixels
that a gradient needs, from which that of the shift follows too, and once to write it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from xdlm.ops.device import given_or

#: The shape of a program's tile, at most.
_PIXELS, _CHANNELS = 64, 64


def fused_group_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    *,
    shift: Tensor | None = None,
    swish: bool = True,
    eps: float = 1e-5,
) -> Tensor:
    """`y` for `x` [n, c, h, w], with `shift` [n, c] or none."""
    return _GroupNorm.apply(x, shift, weight, bias, groups, swish, eps)


class _Tiles(NamedTuple):
    """How images [n, pixels, c] are cut."""

    n: int
    pixels: int
    channels: int
    groups: int
    tile: int
    across: int

    @classmethod
    def of(cls, x: Tensor, groups: int) -> _Tiles:
        n, channels, height, width = x.shape
        tile = min(_PIXELS, triton.next_power_of_2(height * width))
        across = min(_CHANNELS, triton.next_power_of_2(channels))
        return cls(n, height * width, channels, groups, tile, across)

    @property
    def down(self) -> int:
        """Tiles that an image has one below the other."""
        return triton.cdiv(self.pixels, self.tile)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.n, self.down, triton.cdiv(self.channels, self.across)

    @property
    def shape(self) -> dict[str, int]:
        """Constants of the kernels that have a tile."""
        return {
            "C": self.channels, "PER_GROUP": self.channels // self.groups, "TILE": self.tile,
            "ACROSS": self.across,
        }  # fmt: skip

    @property
    def group_shape(self) -> dict[str, int]:
        """And of those that put tiles together for a group."""
        per_group = self.channels // self.groups
        return {
            "C": self.channels, "PER_GROUP": per_group, "TILE": self.tile,
            "DOWN": triton.next_power_of_2(self.down), "WIDE": triton.next_power_of_2(per_group),
        }  # fmt: skip

    def sums(self, like: Tensor) -> Tensor:
        """Two numbers for every tile and channel."""
        return like.new_empty(2, self.n, self.down, self.channels, dtype=torch.float32)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int,
        swish: bool, eps: float,
    ) -> Tensor:  # fmt: skip
        x = x.contiguous(memory_format=torch.channels_last)
        shift = None if shift is None else shift.contiguous()
        tiles = _Tiles.of(x, groups)
        sums, y = tiles.sums(x), torch.empty_like(x)
        means = x.new_empty(tiles.n, tiles.channels, dtype=torch.float32)
        moments = x.new_empty(2, tiles.n, groups, dtype=torch.float32)
        _moments_kernel[tiles.grid](
            x, given_or(shift, x), *sums.unbind(), tiles.pixels, tiles.down, **tiles.shape,
            HAS_SHIFT=shift is not None, num_warps=4,
        )  # fmt: skip
        _group_kernel[(tiles.n, groups)](
            *sums.unbind(), means, *moments.unbind(), tiles.pixels, tiles.down, groups, EPS=eps,
            **tiles.group_shape, num_warps=1,
        )  # fmt: skip
        _apply_kernel[tiles.grid](
            x, given_or(shift, x), weight, bias, *moments.unbind(), y, tiles.pixels, groups,
            **tiles.shape, HAS_SHIFT=shift is not None, SWISH=swish, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(x, shift, weight, bias, means, moments)
        ctx.groups, ctx.swish = groups, swish
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, shift, weight, bias, means, moments = ctx.saved_tensors
        d_y = upstream[0].contiguous(memory_format=torch.channels_last)
        tiles = _Tiles.of(x, ctx.groups)
        sums, d_x = tiles.sums(x), torch.empty_like(x)
        given = (x, given_or(shift, x), weight, bias, *moments.unbind(), d_y)
        flags = {"HAS_SHIFT": shift is not None, "SWISH": ctx.swish}
        _sums_kernel[tiles.grid](
            *given, *sums.unbind(), tiles.pixels, tiles.down, ctx.groups, **tiles.shape, **flags,
            num_warps=4,
        )  # fmt: skip
        by_channel = x.new_empty(2, tiles.n, tiles.channels, dtype=torch.float32)
        by_group = x.new_empty(2, tiles.n, ctx.groups, dtype=torch.float32)
        d_shift = None if shift is None else torch.empty_like(shift)
        _group_backward_kernel[(tiles.n, ctx.groups)](
            *sums.unbind(), weight, means, *moments.unbind(), *by_channel.unbind(),
            *by_group.unbind(), given_or(d_shift, x), tiles.pixels, tiles.down, ctx.groups,
            HAS_SHIFT=shift is not None, **tiles.group_shape, num_warps=1,
        )  # fmt: skip
        _backward_kernel[tiles.grid](
            *given, *by_group.unbind(), d_x, tiles.pixels, ctx.groups, **tiles.shape, **flags,
            num_warps=4,
        )  # fmt: skip
        d_bias, d_weight = by_channel.sum(1).to(weight.dtype).unbind()
        return d_x, d_shift, d_weight, d_bias, None, None, None


@triton.jit
def _tile(pixels, C: tl.constexpr, TILE: tl.constexpr, ACROSS: tl.constexpr):
    """Of this program: channels [1, a], places in memory [t, a], and which of them are there."""
    pixel = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    channel = tl.program_id(2) * ACROSS + tl.arange(0, ACROSS)[None]
    here = (tl.program_id(0).to(tl.int64) * pixels + pixel) * C + channel
    return channel, here, (pixel < pixels) & (channel < C)


@triton.jit
def _shifted(
    x_ptr, shift_ptr, channel, here, inside, C: tl.constexpr, HAS_SHIFT: tl.constexpr
):  # fmt: skip
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        at = tl.program_id(0) * C + channel
        x += tl.load(shift_ptr + at, mask=channel < C, other=0.0).to(tl.float32)
    return x


@triton.jit
def _normed(
    x, mean_ptr, rstd_ptr, channel, groups, C: tl.constexpr, PER_GROUP: tl.constexpr
):  # fmt: skip
    """(x - mean)/deviation, and the inverse of the deviation."""
    group = tl.program_id(0) * groups + channel // PER_GROUP
    mean = tl.load(mean_ptr + group, mask=channel < C, other=0.0)
    rstd = tl.load(rstd_ptr + group, mask=channel < C, other=0.0)
    return (x - mean) * rstd, rstd


@triton.jit
def _moments_kernel(
    x_ptr, shift_ptr, mean_ptr, spread_ptr, pixels, down, C: tl.constexpr, PER_GROUP: tl.constexpr,
    TILE: tl.constexpr, ACROSS: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """Mean of every channel of a tile, and the sum of squared deviations from it."""
    channel, here, inside = _tile(pixels, C, TILE, ACROSS)
    x = _shifted(x_ptr, shift_ptr, channel, here, inside, C, HAS_SHIFT)
    count = tl.minimum(pixels - tl.program_id(1) * TILE, TILE).to(tl.float32)
    mean = tl.sum(tl.where(inside, x, 0.0), 0)[None] / count
    apart = tl.where(inside, x - mean, 0.0)
    at = (tl.program_id(0) * down + tl.program_id(1)) * C + channel
    tl.store(mean_ptr + at, mean, mask=channel < C)
    tl.store(spread_ptr + at, tl.sum(apart * apart, 0)[None], mask=channel < C)


@triton.jit
def _group_tiles(down, C: tl.constexpr, PER_GROUP: tl.constexpr, DOWN: tl.constexpr,
                 WIDE: tl.constexpr):  # fmt: skip
    """Of a program for one group of one image: its channels [1, w], where sums of its tiles are [d, w],
    and which of these are there."""
    tile = tl.arange(0, DOWN)[:, None]
    place = tl.arange(0, WIDE)[None]
    channel = tl.program_id(1) * PER_GROUP + place
    at = (tl.program_id(0) * down + tile) * C + channel
    return tile, place, channel, at, (tile < down) & (place < PER_GROUP)


@triton.jit
def _group_kernel(
    mean_ptr, spread_ptr, channel_mean_ptr, group_mean_ptr, rstd_ptr, pixels, down, groups,
    EPS: tl.constexpr, C: tl.constexpr, PER_GROUP: tl.constexpr, TILE: tl.constexpr,
    DOWN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Moments of a group from those of its tiles: M = sum M_i + n_i (m_i - m)^2."""
    tile, place, channel, at, inside = _group_tiles(down, C, PER_GROUP, DOWN, WIDE)
    count = tl.minimum(pixels - tile * TILE, TILE).to(tl.float32)
    mean = tl.load(mean_ptr + at, mask=inside, other=0.0)
    spread = tl.load(spread_ptr + at, mask=inside, other=0.0)
    by_channel = tl.sum(tl.where(inside, mean * count, 0.0), 0)[None] / pixels
    whole = tl.sum(tl.sum(tl.where(place < PER_GROUP, by_channel, 0.0), 1), 0) / PER_GROUP
    apart = tl.where(inside, spread + count * (mean - whole) * (mean - whole), 0.0)
    variance = tl.sum(tl.sum(apart, 1), 0) / (pixels * PER_GROUP)
    tl.store(channel_mean_ptr + tl.program_id(0) * C + channel, by_channel, mask=place < PER_GROUP)
    group = tl.program_id(0) * groups + tl.program_id(1)
    tl.store(group_mean_ptr + group, whole)
    tl.store(rstd_ptr + group, 1 / tl.sqrt(variance + EPS))


@triton.jit
def _apply_kernel(
    x_ptr, shift_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, y_ptr, pixels, groups,
    C: tl.constexpr, PER_GROUP: tl.constexpr, TILE: tl.constexpr, ACROSS: tl.constexpr,
    HAS_SHIFT: tl.constexpr, SWISH: tl.constexpr,
):  # fmt: skip
    channel, here, inside = _tile(pixels, C, TILE, ACROSS)
    x = _shifted(x_ptr, shift_ptr, channel, here, inside, C, HAS_SHIFT)
    normed, _ = _normed(x, mean_ptr, rstd_ptr, channel, groups, C, PER_GROUP)
    y = normed * tl.load(weight_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
    y += tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
    if SWISH:
        y *= tl.sigmoid(y)
    tl.store(y_ptr + here, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _before_swish(
    normed, weight_ptr, bias_ptr, d_y_ptr, channel, here, inside, C: tl.constexpr,
    SWISH: tl.constexpr,
):  # fmt: skip
    """The weight, and the gradient at what the swish was given."""
    weight = tl.load(weight_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
    d = tl.load(d_y_ptr + here, mask=inside, other=0.0).to(tl.float32)
    if SWISH:
        a = normed * weight + tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(
            tl.float32
        )
        s = tl.sigmoid(a)
        d *= s * (1 + a * (1 - s))
    return weight, d


@triton.jit
def _sums_kernel(
    x_ptr, shift_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, d_y_ptr, sum_ptr, by_normed_ptr,
    pixels, down, groups, C: tl.constexpr, PER_GROUP: tl.constexpr, TILE: tl.constexpr,
    ACROSS: tl.constexpr, HAS_SHIFT: tl.constexpr, SWISH: tl.constexpr,
):  # fmt: skip
    """For every channel of a tile the sum of the gradient before the swish, and of that times the normed
    input."""
    channel, here, inside = _tile(pixels, C, TILE, ACROSS)
    x = _shifted(x_ptr, shift_ptr, channel, here, inside, C, HAS_SHIFT)
    normed, _ = _normed(x, mean_ptr, rstd_ptr, channel, groups, C, PER_GROUP)
    _, d = _before_swish(
        normed, weight_ptr, bias_ptr, d_y_ptr, channel, here, inside, C, SWISH
    )  # fmt: skip
    at = (tl.program_id(0) * down + tl.program_id(1)) * C + channel
    tl.store(sum_ptr + at, tl.sum(d, 0)[None], mask=channel < C)
    tl.store(by_normed_ptr + at, tl.sum(d * normed, 0)[None], mask=channel < C)


@triton.jit
def _group_backward_kernel(
    sum_ptr, by_normed_ptr, weight_ptr, channel_mean_ptr, mean_ptr, rstd_ptr, d_bias_ptr,
    d_weight_ptr, mean_d_ptr, mean_by_normed_ptr, d_shift_ptr, pixels, down, groups,
    HAS_SHIFT: tl.constexpr, C: tl.constexpr, PER_GROUP: tl.constexpr, TILE: tl.constexpr,
    DOWN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The sums of an image's channels, their means over a group with the weights, and the gradient of the
    shift: the sum of what `_backward_kernel` writes."""
    _, place, channel, at, inside = _group_tiles(down, C, PER_GROUP, DOWN, WIDE)
    own = place < PER_GROUP
    d = tl.sum(tl.load(sum_ptr + at, mask=inside, other=0.0), 0)[None]
    by_normed = tl.sum(tl.load(by_normed_ptr + at, mask=inside, other=0.0), 0)[None]
    weight = tl.load(weight_ptr + channel, mask=own, other=0.0).to(tl.float32)
    of_image = tl.program_id(0) * C + channel
    tl.store(d_bias_ptr + of_image, d, mask=own)
    tl.store(d_weight_ptr + of_image, by_normed, mask=own)
    mean_d = tl.sum(tl.sum(weight * d, 1), 0) / (pixels * PER_GROUP)
    mean_by_normed = tl.sum(tl.sum(weight * by_normed, 1), 0) / (pixels * PER_GROUP)
    group = tl.program_id(0) * groups + tl.program_id(1)
    tl.store(mean_d_ptr + group, mean_d)
    tl.store(mean_by_normed_ptr + group, mean_by_normed)
    if HAS_SHIFT:
        rstd = tl.load(rstd_ptr + group)
        channel_mean = tl.load(channel_mean_ptr + of_image, mask=own, other=0.0)
        normed = (channel_mean - tl.load(mean_ptr + group)) * rstd * pixels
        d_shift = rstd * (weight * d - pixels * mean_d - normed * mean_by_normed)
        tl.store(d_shift_ptr + of_image, d_shift.to(d_shift_ptr.dtype.element_ty), mask=own)


@triton.jit
def _backward_kernel(
    x_ptr, shift_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, d_y_ptr, mean_d_ptr,
    mean_by_normed_ptr, d_x_ptr, pixels, groups, C: tl.constexpr, PER_GROUP: tl.constexpr,
    TILE: tl.constexpr, ACROSS: tl.constexpr, HAS_SHIFT: tl.constexpr, SWISH: tl.constexpr,
):  # fmt: skip
    channel, here, inside = _tile(pixels, C, TILE, ACROSS)
    x = _shifted(x_ptr, shift_ptr, channel, here, inside, C, HAS_SHIFT)
    normed, rstd = _normed(x, mean_ptr, rstd_ptr, channel, groups, C, PER_GROUP)
    weight, d = _before_swish(
        normed, weight_ptr, bias_ptr, d_y_ptr, channel, here, inside, C, SWISH
    )  # fmt: skip
    group = tl.program_id(0) * groups + channel // PER_GROUP
    mean_d = tl.load(mean_d_ptr + group, mask=channel < C, other=0.0)
    mean_by_normed = tl.load(mean_by_normed_ptr + group, mask=channel < C, other=0.0)
    d_x = rstd * (d * weight - mean_d - normed * mean_by_normed)
    tl.store(d_x_ptr + here, d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
