"""The U-Net of the paper for pixels, after Ho et al. 2020, with an output law after Austin et al. 2021: a
discretised logistic, whose tails belong to the levels 0 and 255 here, where theirs are cut off and the rest
is normalised.

It sees levels as numbers in [-1, 1], and masks as 0 in one channel and as 1 in another beside it. For every
token it gives a place and a width, from which `head` makes a logistic law over the levels; the place starts
from where the noisy token is. Norms, time and class work as in Ho et al.: group norm and swish before every
convolution, and a vector for time plus class that is added inside every block. The channels of a pixel lie
side by side in memory, as tokens do, all the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from xdlm.errors import UserError
from xdlm.models.contract import BackboneConfig, Denoiser, refuse_labels
from xdlm.models.layers import TimeEmbedding, kernels_can_run
from xdlm.models.logistic import LOG_SCALES, SHIFT, level_draws, level_log_probs, level_stats
from xdlm.ops.attention import attention
from xdlm.ops.head import Guide
from xdlm.structs import RowStats

_LEVELS, _COLOURS = 256, 3


@dataclass(frozen=True)
class UNetConfig(BackboneConfig):
    """The shape of a U-Net."""

    kind: ClassVar[str] = "unet"
    free: ClassVar[tuple[str, ...]] = (*BackboneConfig.free, "side")

    side: int = 32
    """Pixels along a side of an image; rows have 3 x side x side tokens."""
    channels: int = 128
    """Channels at full size."""
    multipliers: str = "1-2-2-2"
    """Channels at each size as multiples of that; each size has half the side of the one before."""
    blocks: int = 2
    """Residual blocks at each size, on the way down; on the way up there is one more."""
    attention: int = 16
    """The side at which positions attend to each other, as they do at the smallest; 0 for there alone."""
    dropout: float = 0.1
    """Dropout inside residual blocks, in training."""
    time_conditioning: bool = True
    """Tell the model the time."""
    time_scale: float = 1000.0
    """Times in [0, 1] are spread over this range, so that the sinusoids resolve them."""
    n_classes: int = 0
    """Number of classes for conditional generation; 0 for none."""
    label_dropout: float = 0.1
    """Share of training labels replaced by "no class", so that guidance has both."""

    def __post_init__(self) -> None:
        if (
            min(self.side, self.channels, self.blocks) < 1
            or min(self.attention, self.n_classes) < 0
        ):
            raise UserError("a U-Net's side, channels and blocks must be >= 1, and the rest >= 0")
        for name in ("dropout", "label_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.side % 2 ** (len(self.widths) - 1):
            raise UserError(f"side {self.side} cannot be halved {len(self.widths) - 1} times")
        sizes = [self.side // 2**i for i in range(len(self.widths))]
        if self.attention not in (0, *sizes):
            raise UserError(
                f"attention must be one of the sizes that the image has on its way, {sizes}, or 0 for none "
                f"but in the middle, got {self.attention}"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels at each size, the full one first."""
        try:
            multipliers = [int(part) for part in self.multipliers.split("-")]
        except ValueError:
            multipliers = []
        if not multipliers or min(multipliers) < 1:
            raise UserError(f"multipliers must read like 1-2-2-2, got '{self.multipliers}'")
        return tuple(self.channels * multiplier for multiplier in multipliers)

    def own_length(self) -> int:
        return _COLOURS * self.side**2


class UNet(Denoiser):
    """A `Denoiser` for the levels of square colour images. The state behind the levels is the mask."""

    linear_head = False
    replayable = True

    def __init__(self, config: UNetConfig, vocab_size: int, *, causal: bool = False) -> None:
        super().__init__()
        if vocab_size not in (_LEVELS, _LEVELS + 1) or causal:
            raise UserError(
                f"a U-Net undoes noise on {_LEVELS} levels, with a mask or without, not on a vocabulary "
                f"of {vocab_size}: set data.tokenizer to pixels"
            )
        self.config, self.n_classes, self._n_states = config, config.n_classes, vocab_size
        widths, cond = config.widths, 4 * config.channels
        self.time_embed = TimeEmbedding(cond, config.time_scale)
        self.label_embed = nn.Embedding(config.n_classes + 1, cond) if config.n_classes else None
        seen = _COLOURS * (1 if vocab_size == _LEVELS else 2)
        self.into = nn.Conv2d(seen, config.channels, 3, padding=1)
        self.down, skips = _way_down(config, cond)
        self.middle = nn.ModuleList(
            [
                ResidualBlock(widths[-1], widths[-1], cond, config.dropout, attends=True),
                ResidualBlock(widths[-1], widths[-1], cond, config.dropout),
            ]
        )
        self.up = _way_up(config, cond, skips)
        self.final_norm = _norm(widths[0])
        self.out = nn.Conv2d(widths[0], 2 * _COLOURS, 3, padding=1)
        for parameter in self.out.parameters():
            nn.init.zeros_(parameter)

    @property
    def n_states(self) -> int:
        return self._n_states

    def flops_per_token(self, length: int, head_share: float = 1.0) -> float:
        """Of all products of matrices and convolutions, counted on one image without memory: 1 forward and
        2 backward. The head is no product, and left out."""
        return 3 * _forward_flops(self.config, self._n_states) / length

    def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        """Place and raw width of every token, [B, L, 2], in float32 whatever the weights are: a place
        rounded to bfloat16 would be off by levels."""
        side = self.config.side
        if z.shape[1] != self.config.own_length():
            raise UserError(
                f"this U-Net is for {self.config.own_length()} tokens, images of {side} x {side} "
                f"pixels; got {z.shape[1]}"
            )
        work = torch.promote_types(self.out.weight.dtype, torch.float32)
        value, seen = self._seen(z.view(-1, side, side, _COLOURS).permute(0, 3, 1, 2), work)
        cond = F.silu(self._condition(t, label))
        h = self.into(seen.to(self.into.weight.dtype))
        kernels = self.kernels and kernels_can_run(h)
        skips = [h]
        for block in self.down:
            h = block(h, cond, kernels)
            skips.append(h)
        for block in self.middle:
            h = block(h, cond, kernels)
        for block in self.up:
            h = h if isinstance(block, Grow) else torch.cat([h, skips.pop()], dim=1)
            h = block(h, cond, kernels)
        weight, bias = (parameter.to(work) for parameter in self.out.parameters())
        h = F.conv2d(normed(self.final_norm, h, kernels).to(work), weight, bias, padding=1)
        shift, raw_scale = h.chunk(2, dim=1)
        parts = torch.stack([torch.tanh(value + shift), raw_scale], dim=-1)
        return parts.permute(0, 2, 3, 1, 4).reshape(*z.shape, 2)

    def head(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of the levels; no mass on the mask."""
        work = torch.promote_types(hidden.dtype, torch.float32)
        location, raw_scale = hidden.to(work).unbind(-1)
        logits = level_log_probs(location, raw_scale, _LEVELS)
        return F.pad(logits, (0, self._n_states - _LEVELS), value=-torch.inf)

    def has_kernel_for(self, hidden: Tensor) -> bool:
        return self.kernels and kernels_can_run(hidden) and hidden.dtype == torch.float32

    def own_stats(self, hidden: Tensor, x: Tensor, z: Tensor, log_c: Tensor | None) -> RowStats:
        rows = (x.reshape(-1), z.reshape(-1), None if log_c is None else log_c.reshape(-1))
        if self.has_kernel_for(hidden):
            from xdlm.ops.fused_logistic import Law, logistic_row_stats

            law = Law(_LEVELS, SHIFT, *LOG_SCALES)
            stats = logistic_row_stats(hidden.reshape(-1, 2), *rows, law)
        else:
            work = torch.promote_types(hidden.dtype, torch.float32)
            location, raw_scale = hidden.reshape(-1, 2).to(work).unbind(-1)
            stats = level_stats(location, raw_scale, *rows, _LEVELS)
        return RowStats(*(field.view(x.shape) for field in stats))

    def own_draws(
        self, hidden: Tensor, uniform: Tensor, z: Tensor, guide: Guide | None
    ) -> tuple[Tensor, Tensor] | None:
        """In closed form; under guidance, where the law is no logistic one, by a kernel."""
        if guide is None:
            location, raw_scale = hidden.unbind(-1)
            return level_draws(location, raw_scale, uniform, z, _LEVELS)
        if not self.has_kernel_for(hidden):
            return None
        from xdlm.ops.fused_logistic import Law, guided_logistic_draws

        law = Law(_LEVELS, SHIFT, *LOG_SCALES)
        return guided_logistic_draws(hidden, guide.hidden, guide.scale, uniform, z, law)

    def _seen(self, z: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Levels on [-1, 1] with masks at 0, and all input channels."""
        value = z.to(dtype) * (2 / (_LEVELS - 1)) - 1
        if self._n_states == _LEVELS:
            return value, value
        masked = z == _LEVELS
        value = torch.where(masked, 0.0, value)
        return value, torch.cat([value, masked.to(dtype)], dim=1)

    def _condition(self, t: Tensor, label: Tensor | None) -> Tensor:
        cond = self.time_embed(t if self.config.time_conditioning else torch.zeros_like(t))
        if self.label_embed is None:
            refuse_labels(label)
            return cond
        if label is None:
            label = torch.full_like(t, -1, dtype=torch.int64)
        # "No class" is the last row of the table.
        return cond + self.label_embed(torch.where(label < 0, self.n_classes, label))


@cache
def _forward_flops(config: UNetConfig, n_states: int) -> int:
    """Operations of a forward pass for one image."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        model = UNet(config, n_states).eval()
        model.trunk(torch.zeros(1, config.own_length(), dtype=torch.int64), torch.zeros(1))
    return counter.get_total_flops()


def _way_down(config: UNetConfig, cond: int) -> tuple[nn.ModuleList, list[int]]:
    """The blocks, and the widths of what each hands over to the way up, the input's first."""
    blocks: list[nn.Module] = []
    widths, side, skips = config.widths, config.side, [config.channels]
    for level, width in enumerate(widths):
        for _ in range(config.blocks):
            attends = side == config.attention
            blocks.append(ResidualBlock(skips[-1], width, cond, config.dropout, attends=attends))
            skips.append(width)
        if level < len(widths) - 1:
            blocks.append(Shrink(width))
            skips.append(width)
            side //= 2
    return nn.ModuleList(blocks), skips


def _way_up(config: UNetConfig, cond: int, skips: list[int]) -> nn.ModuleList:
    blocks: list[nn.Module] = []
    left, n_levels, width_in = list(skips), len(config.widths), config.widths[-1]
    for level in reversed(range(n_levels)):
        side, width = config.side >> level, config.widths[level]
        for _ in range(config.blocks + 1):
            attends = side == config.attention
            blocks.append(
                ResidualBlock(width_in + left.pop(), width, cond, config.dropout, attends=attends)
            )
            width_in = width
        if level > 0:
            blocks.append(Grow(width))
    return nn.ModuleList(blocks)


class ResidualBlock(nn.Module):
    """Two convolutions with the condition added between them, then attention where it is wanted. Both
    branches start at zero."""

    def __init__(
        self, width_in: int, width: int, cond: int, dropout: float, *, attends: bool = False
    ) -> None:
        super().__init__()
        self.norm_in, self.conv_in = _norm(width_in), nn.Conv2d(width_in, width, 3, padding=1)
        self.condition = nn.Linear(cond, width)
        self.norm_out, self.conv_out = _norm(width), nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()
        self.attention = Attention(width) if attends else None
        self.dropout = dropout
        nn.init.zeros_(self.conv_out.weight)

    def forward(self, h: Tensor, cond: Tensor, kernels: bool) -> Tensor:
        branch = F.conv2d(normed(self.norm_in, h, kernels), self.conv_in.weight, padding=1)
        shift = self.condition(cond) + self.conv_in.bias  # the next norm adds both as it reads
        branch = F.dropout(
            normed(self.norm_out, branch, kernels, shift=shift), self.dropout, self.training
        )
        if isinstance(self.skip, nn.Conv2d):  # the biases of both are added at once
            branch = F.conv2d(branch, self.conv_out.weight, padding=1)
            h = by_pixel(h, self.skip, self.conv_out.bias) + branch
        else:
            h = h + self.conv_out(branch)
        return h if self.attention is None else self.attention(h, kernels)


class Attention(nn.Module):
    """Every pixel looks at every other, with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = _norm(width), nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)
        nn.init.zeros_(self.out.weight)

    def forward(self, h: Tensor, kernels: bool) -> Tensor:
        seen = by_pixel(normed(self.norm, h, kernels, swish=False), self.qkv)
        query, key, value = seen.flatten(2).mT[:, None].chunk(3, dim=-1)
        attended = attention(query, key, value)
        return h + by_pixel(attended[:, 0].mT.reshape_as(h), self.out)


class Shrink(nn.Module):
    """To half the side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2, padding=1)

    def forward(self, h: Tensor, cond: Tensor, kernels: bool) -> Tensor:
        return self.conv(h)


class Grow(nn.Module):
    """To twice the side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, h: Tensor, cond: Tensor, kernels: bool) -> Tensor:
        return self.conv(F.interpolate(h, scale_factor=2.0, mode="nearest"))


def by_pixel(h: Tensor, layer: nn.Conv2d, more: Tensor | None = None) -> Tensor:
    """A convolution of single pixels as the product of matrices that it is, plus `more` for each channel: a
    product adds a bias as it writes, where a convolution leaves it to a pass of its own."""
    assert layer.bias is not None
    bias = layer.bias if more is None else layer.bias + more
    pixels = h.permute(0, 2, 3, 1)
    rows = F.linear(pixels.flatten(0, 2), layer.weight.flatten(1), bias)
    return rows.view(*pixels.shape[:3], -1).permute(0, 3, 1, 2)


def _norm(width: int) -> nn.GroupNorm:
    """In at most 32 groups of at least 4 channels: a group of one would take out again what the condition
    adds to its channel."""
    most = max(1, min(32, width // 4))
    return nn.GroupNorm(next(groups for groups in range(most, 0, -1) if width % groups == 0), width)


def normed(
    norm: nn.Module, h: Tensor, kernels: bool, *, shift: Tensor | None = None, swish: bool = True
) -> Tensor:
    """The norm of `h` [n, c, h, w] plus `shift` [n, c], and its swish: by kernels, or step by step."""
    if kernels and isinstance(norm, nn.GroupNorm):
        from xdlm.ops.fused_group_norm import fused_group_norm

        return fused_group_norm(
            h, norm.weight, norm.bias, norm.num_groups, shift=shift, swish=swish, eps=norm.eps
        )
    h = norm(h if shift is None else h + shift[:, :, None, None])
    return F.silu(h) if swish else h
