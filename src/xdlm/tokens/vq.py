"""Images as codes: an encoder, a table of code vectors, a decoder (van den Oord et al. 2017).

Every cell of a coarse grid is the code whose vector is nearest to what the encoder says of it, by angle:
both are of length 1. The names and shapes of all weights are those of LlamaGen's VQ models (Sun et al.
2024), so that their published files can be read; `VqConfig()` is their VQ-16: 16,384 codes, 16 x 16 of them
for an image of 256 x 256.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from xdlm.errors import UserError
from xdlm.tokens.torch_file import read_torch_file

#: The files of a codec that was trained here.
DESCRIPTION, WEIGHTS = "codec.json", "codec.safetensors"
#: Of the published file, a record of training.
_NO_WEIGHT = "quantize.codebook_used"


@dataclass(frozen=True)
class VqConfig:
    """The shape of a codec; the defaults are LlamaGen's VQ-16."""

    channels: int = 128
    """Channels at full size."""
    multipliers: str = "1-1-2-2-4"
    """Channels at each size as multiples of that; each size has half the side of the one before."""
    blocks: int = 2
    """Residual blocks at each size, in the encoder; in the decoder there is one more."""
    latent: int = 256
    """Channels between the codes and the networks."""
    codes: int = 16384
    """Vectors in the table: the vocabulary."""
    code_width: int = 8
    """Size of these vectors."""

    def __post_init__(self) -> None:
        if min(self.channels, self.blocks, self.latent, self.code_width) < 1 or self.codes < 2:
            raise UserError("a codec's sizes must be >= 1, and it needs at least 2 codes")
        if not self.widths:
            raise UserError(f"multipliers must read like 1-1-2-2-4, got '{self.multipliers}'")

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels at each size, the full one first; none where the multipliers are not numbers."""
        parts = self.multipliers.split("-")
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            return ()
        return tuple(self.channels * int(part) for part in parts)

    @property
    def shrink(self) -> int:
        """Pixels along a side of a cell."""
        return 2 ** (len(self.widths) - 1)


class Losses(NamedTuple):
    """Of a batch of images, all means: how far pixels are from the original, codes from what the encoder
    says, and the encoder from the codes. And which codes these were [n, h, w], for what the encoder said
    [n, d, h, w]; the images on [-1, 1], channels first, and what the decoder made of the codes."""

    pixels: Tensor
    codes: Tensor
    commitment: Tensor
    chosen: Tensor
    said: Tensor
    original: Tensor
    made: Tensor

    def total(self, beta: float = 0.25) -> Tensor:
        return self.pixels + self.codes + beta * self.commitment


class VqCodec(nn.Module):
    """Bytes [n, side, side, 3] to codes [n, cells] and back."""

    def __init__(self, config: VqConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.quantize = Table(config.codes, config.code_width)
        self.quant_conv = nn.Conv2d(config.latent, config.code_width, 1)
        self.post_quant_conv = nn.Conv2d(config.code_width, config.latent, 1)

    @torch.no_grad()
    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Codes row by row, [n, (side/shrink)^2]."""
        return self.quantize.nearest(self._vectors(self._scaled(images))).flatten(1).cpu().numpy()

    @torch.no_grad()
    def decode(self, codes: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Square images of as many cells, in bytes."""
        side = round(codes.shape[1] ** 0.5)
        if side**2 != codes.shape[1]:
            raise UserError(f"{codes.shape[1]} codes do not make a square of cells")
        if codes.size and (codes.min() < 0 or codes.max() >= self.config.codes):
            raise UserError(f"codes must lie in 0..{self.config.codes - 1}")
        index = torch.from_numpy(codes.astype(np.int64)).to(self._device).view(-1, side, side)
        levels = (self._pixels(self.quantize.vectors()[index].movedim(-1, 1)) + 1) * 127.5
        image = levels.round().clamp(0, 255).to(torch.uint8)
        return image.movedim(1, -1).contiguous().cpu().numpy()

    def losses(self, images: NDArray[np.uint8]) -> Losses:
        """To be minimised. The gradient passes the choice of codes as if it were none."""
        original = self._scaled(images)
        said = self._vectors(original)
        chosen = self.quantize.nearest(said)
        vectors = self.quantize.vectors()[chosen].movedim(-1, 1)
        made = self._pixels(said + (vectors - said).detach())
        return Losses(
            F.mse_loss(made, original),
            F.mse_loss(vectors, said.detach()),
            F.mse_loss(said, vectors.detach()),
            chosen, said.detach(), original, made,
        )  # fmt: skip

    @property
    def _device(self) -> torch.device:
        return self.quant_conv.weight.device

    def _scaled(self, images: NDArray[np.uint8]) -> Tensor:
        """On [-1, 1], channels first."""
        shrink = self.config.shrink
        fits = images.ndim == 4 and images.shape[1] == images.shape[2] and images.shape[3] == 3
        if images.dtype != np.uint8 or not fits or images.shape[1] % shrink or not images.shape[1]:
            raise UserError(
                f"this codec takes square colour images in bytes with a side that is a multiple of "
                f"{shrink}, got {images.dtype} of shape {images.shape[1:]}"
            )
        host = torch.from_numpy(np.ascontiguousarray(images))
        if self._device.type == "cuda":  # or the copy would wait for all that was asked for before
            host = host.pin_memory()
        pixels = host.to(self._device, non_blocking=True)
        return pixels.movedim(-1, 1).to(self.quant_conv.weight.dtype) / 127.5 - 1

    def _vectors(self, scaled: Tensor) -> Tensor:
        return F.normalize(self.quant_conv(self.encoder(scaled)), dim=1)

    def _pixels(self, vectors: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(vectors))


class Table(nn.Module):
    """Code vectors of length 1."""

    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, width)
        nn.init.normal_(self.embedding.weight)

    def vectors(self) -> Tensor:
        return F.normalize(self.embedding.weight, dim=-1)

    def nearest(self, vectors: Tensor) -> Tensor:
        """The code [n, h, w] of the smallest angle to each vector of `vectors` [n, d, h, w]."""
        return (vectors.movedim(1, -1) @ self.vectors().T).argmax(-1)


class Encoder(nn.Module):
    def __init__(self, config: VqConfig) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = nn.Conv2d(3, config.channels, 3, padding=1)
        self.conv_blocks, width = nn.ModuleList(), config.channels
        for level, wider in enumerate(widths):
            last = level == len(widths) - 1
            stage = Stage(width, wider, config.blocks, attends=last)
            if not last:
                stage.downsample = Shrink(wider)
            self.conv_blocks.append(stage)
            width = wider
        self.mid = _middle(width)
        self.norm_out, self.conv_out = (
            group_norm(width),
            nn.Conv2d(width, config.latent, 3, padding=1),
        )

    def forward(self, h: Tensor) -> Tensor:
        h = self.conv_in(h)
        for block in (*self.conv_blocks, *self.mid):
            h = block(h)
        return self.conv_out(F.silu(self.norm_out(h)))


class Decoder(nn.Module):
    def __init__(self, config: VqConfig) -> None:
        super().__init__()
        widths = config.widths[::-1]
        width = widths[0]
        self.conv_in = nn.Conv2d(config.latent, width, 3, padding=1)
        self.mid = _middle(width)
        self.conv_blocks = nn.ModuleList()
        for level, narrower in enumerate(widths):
            stage = Stage(width, narrower, config.blocks + 1, attends=level == 0)
            if level < len(widths) - 1:
                stage.upsample = Grow(narrower)
            self.conv_blocks.append(stage)
            width = narrower
        self.norm_out, self.conv_out = group_norm(width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        h = self.conv_in(h)
        for block in (*self.mid, *self.conv_blocks):
            h = block(h)
        return self.conv_out(F.silu(self.norm_out(h)))


class Stage(nn.Module):
    """The blocks of one size, each with attention behind it where it is wanted, and the way to the next."""

    def __init__(self, width_in: int, width: int, blocks: int, *, attends: bool) -> None:
        super().__init__()
        inner = [width_in, *[width] * (blocks - 1)]
        self.res = nn.ModuleList(ResidualBlock(before, width) for before in inner)
        self.attn = nn.ModuleList(Attention(width) for _ in inner if attends)
        self.downsample: nn.Module | None = None
        self.upsample: nn.Module | None = None

    def forward(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            h = block(h)
            if len(self.attn):
                h = self.attn[i](h)
        for resize in (self.downsample, self.upsample):
            h = h if resize is None else resize(h)
        return h


class ResidualBlock(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = group_norm(width_in), nn.Conv2d(width_in, width, 3, padding=1)
        self.norm2, self.conv2 = group_norm(width), nn.Conv2d(width, width, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(width_in, width, 1) if width_in != width else None

    def forward(self, h: Tensor) -> Tensor:
        branch = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(h))))))
        return branch + (h if self.nin_shortcut is None else self.nin_shortcut(h))


class Attention(nn.Module):
    """Every cell looks at every other, with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = group_norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        normed = self.norm(h)
        q, k, v = (part(normed).flatten(2).mT[:, None] for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v)[:, 0].mT.reshape_as(h)
        return h + self.proj_out(attended)


class Shrink(nn.Module):
    """To half the side; the padding is on the right and below."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, h: Tensor) -> Tensor:
        return self.conv(F.pad(h, (0, 1, 0, 1)))


class Grow(nn.Module):
    """To twice the side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        return self.conv(F.interpolate(h, scale_factor=2.0, mode="nearest"))


def load_codec(folder: Path) -> VqCodec:
    """A codec that was trained here: codec.json and codec.safetensors, checked against each other."""
    description, weights = folder / DESCRIPTION, folder / WEIGHTS
    try:
        tree = json.loads(description.read_text(encoding="utf-8"))
        config, expected = VqConfig(**tree["config"]), tree["sha256"]
        found = hashlib.sha256(weights.read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise UserError(f"no codec at {folder}: {error.filename} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{description} is damaged: {error}") from error
    if found != expected:
        raise UserError(f"{weights} is damaged: its content does not match {DESCRIPTION}")
    codec = VqCodec(config)
    codec.load_state_dict(_fitting(load_file(weights), codec.state_dict(), weights))
    return codec.eval().requires_grad_(False)


def read_llamagen(file: Path, config: VqConfig | None = None) -> VqCodec:
    """A codec with LlamaGen's published weights (`vq_ds16_c2i.pt`, by default its VQ-16), strictly: the
    same names and shapes, or an error."""
    if not file.is_file():
        raise UserError(f"no codec at {file}")
    codec = VqCodec(config if config is not None else VqConfig())
    codec.load_state_dict(_fitting(read_torch_file(file), codec.state_dict(), file))
    return codec.eval().requires_grad_(False)


def _fitting(content: Any, wanted: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """The weights of a published file, found to be those that are wanted."""
    tree = content if isinstance(content, dict) else {}
    held = next((tree[key] for key in ("ema", "model", "state_dict") if key in tree), tree)
    found = {name: value for name, value in held.items() if name != _NO_WEIGHT}
    for what, names in (("has no", wanted.keys() - found), ("has also", found.keys() - wanted)):
        if names:
            raise UserError(
                f"{file} is another codec: it {what} '{min(names)}' ({len(names)} names differ)"
            )
    for name, tensor in wanted.items():
        if not isinstance(found[name], Tensor) or found[name].shape != tensor.shape:
            got = tuple(getattr(found[name], "shape", ()))
            raise UserError(
                f"{file} is another codec: '{name}' is {got}, not {tuple(tensor.shape)}"
            )
    return found


def _middle(width: int) -> nn.ModuleList:
    return nn.ModuleList(
        [ResidualBlock(width, width), Attention(width), ResidualBlock(width, width)]
    )


def group_norm(width: int) -> nn.GroupNorm:
    most = max(1, min(32, width // 4))
    groups = next(groups for groups in range(most, 0, -1) if width % groups == 0)
    return nn.GroupNorm(groups, width, eps=1e-6)
