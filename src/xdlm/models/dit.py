"""The diffusion transformer of the paper: rotary positions, adaptive layer norm, untied head.

The layout follows the DiT that SEDD and MDLM use for text (Lou et al. 2023, Sahoo et al. 2024):
norms without bias, qkv and output projections without bias, an MLP with biases and tanh-GELU, and
modulation and head that start at zero, so that an untrained model predicts the uniform law.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xdlm.errors import UserError
from xdlm.models.contract import Denoiser


@dataclass(frozen=True)
class DiTConfig:
    """The shape of a DiT."""

    depth: int = 12
    """Number of transformer blocks."""
    width: int = 768
    """Size of the hidden states."""
    heads: int = 12
    """Number of attention heads."""
    cond_width: int = 128
    """Size of the conditioning vector that drives adaptive layer norm."""
    mlp_ratio: int = 4
    """Hidden size of the MLP as a multiple of the width."""
    dropout: float = 0.1
    """Dropout on both residual branches, in training."""
    time_conditioning: bool = False
    """Tell the model the time; the paper keeps the branch and feeds it zeros."""
    n_classes: int = 0
    """Number of classes for conditional generation; 0 for none."""
    label_dropout: float = 0.1
    """Share of training labels replaced by "no class", so that guidance has both."""

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.heads, self.cond_width, self.mlp_ratio) < 1:
            raise UserError("a model's depth, width, heads, cond_width and mlp_ratio must be >= 1")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise UserError(
                f"width {self.width} must be a multiple of 2 x heads ({2 * self.heads}): "
                "each head rotates pairs of features"
            )
        for name in ("dropout", "label_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must lie in [0, 1), got {getattr(self, name)}")


#: Shapes by name; "small" is the paper's.
PRESETS: dict[str, DiTConfig] = {
    "small": DiTConfig(),
    "tiny": DiTConfig(depth=8, width=384, heads=6),
    "pocket": DiTConfig(depth=4, width=256, heads=4, cond_width=16, dropout=0.0),
    "nano": DiTConfig(depth=2, width=64, heads=2, cond_width=16, dropout=0.0),
}


class DiT(Denoiser):
    """A `Denoiser` for token sequences of any length."""

    def __init__(self, config: DiTConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(vocab_size, config.width)
        bound = 1 / math.sqrt(config.width)
        nn.init.uniform_(self.embed.weight, -bound, bound)
        self.time_embed = TimeEmbedding(config.cond_width)
        self.label_embed = (
            nn.Embedding(config.n_classes + 1, config.cond_width) if config.n_classes else None
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_norm = AdaptiveNorm(config.width, config.cond_width, gated=False)
        self.out = nn.Linear(config.width, vocab_size)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self._fill_table(1024)

    def _fill_table(self, length: int) -> None:
        """Angles for positions up to `length`, kept in float32 whatever the weights are: computed
        inside the trunk, a compiler would fold their cosines into every use of them."""
        head_width = self.config.width // self.config.heads
        self._table = rotary_angles(length, head_width, self.out.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DiT:
        super()._apply(fn, recurse)
        self._fill_table(len(self._table[0]))
        return self

    @property
    def head_weight(self) -> Tensor:
        return self.out.weight

    @property
    def head_bias(self) -> Tensor:
        return self.out.bias

    def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        cond = F.silu(self._condition(t, label))
        length = z.shape[1]
        if length > len(self._table[0]):
            self._fill_table(2 * length)
        angles = (self._table[0][:length], self._table[1][:length])
        h = self.embed(z)
        for block in self.blocks:
            h = block(h, cond, angles)
        h, _ = self.final_norm(h, cond)
        return h

    def _condition(self, t: Tensor, label: Tensor | None) -> Tensor:
        """The conditioning vector, [B, cond_width], or [1, cond_width] when nothing varies."""
        if self.config.time_conditioning:
            cond = self.time_embed(t)
        else:
            cond = self.time_embed(torch.zeros_like(t[:1]))
        if self.label_embed is None:
            if label is not None:
                raise UserError("this model was built without classes: n_classes is 0")
            return cond
        if label is None:
            label = torch.full_like(t, -1, dtype=torch.int64)
        # "No class" is the last row of the table.
        return cond + self.label_embed(torch.where(label < 0, self.config.n_classes, label))


class Block(nn.Module):
    """Attention and MLP, each normed, modulated, gated and added back."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        width, inner = config.width, config.width * config.mlp_ratio
        self.attn_norm = AdaptiveNorm(width, config.cond_width, gated=True)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = AdaptiveNorm(width, config.cond_width, gated=True)
        self.mlp_in = nn.Linear(width, inner)
        self.mlp_out = nn.Linear(inner, width)

    def forward(self, h: Tensor, cond: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        normed, gate = self.attn_norm(h, cond)
        h = h + gate * self._drop(self._attend(normed, angles))
        normed, gate = self.mlp_norm(h, cond)
        return h + gate * self._drop(self.mlp_out(gelu_of(self.mlp_in, normed)))

    def _attend(self, h: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = h.shape
        qkv = self.qkv(h).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v)
        return self.attn_out(attended.transpose(1, 2).reshape(batch, length, width))

    def _drop(self, h: Tensor) -> Tensor:
        return F.dropout(h, self.dropout, self.training)


def gelu_of(linear: nn.Linear, h: Tensor) -> Tensor:
    """tanh-GELU of a linear layer. On a GPU, where no gradient is asked for, the matrix product
    applies bias and GELU itself, which saves writing and reading its result once."""
    if h.is_cuda and not torch.is_grad_enabled():
        flat = h.reshape(-1, h.shape[-1])
        fused = torch._addmm_activation(linear.bias, flat, linear.weight.T, use_gelu=True)
        return fused.view(*h.shape[:-1], -1)
    return F.gelu(linear(h), approximate="tanh")


class AdaptiveNorm(nn.Module):
    """Layer norm, then a scale and a shift that the conditioning vector decides; also a gate."""

    def __init__(self, width: int, cond_width: int, *, gated: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.gated = gated
        self.modulation = nn.Linear(cond_width, (3 if gated else 2) * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, h: Tensor, cond: Tensor) -> tuple[Tensor, Tensor]:
        """The modulated input, and the gate for the branch that it feeds (0 if not gated)."""
        parts = self.modulation(cond)[:, None].chunk(3 if self.gated else 2, dim=-1)
        shift, scale = parts[:2]
        return self.norm(h) * (1 + scale) + shift, parts[-1]


class TimeEmbedding(nn.Module):
    """Sinusoids of the time, then a small MLP."""

    N_FREQUENCIES = 128
    #: Times in [0, 1] are spread over this range, so that the sinusoids resolve them.
    SCALE = 1000.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(2 * self.N_FREQUENCIES, width)
        self.out = nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        exponent = torch.arange(self.N_FREQUENCIES, device=t.device) / self.N_FREQUENCIES
        angle = (t[:, None] * self.SCALE).float() * torch.exp(-math.log(10_000) * exponent)
        features = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.into.weight.dtype)
        return self.out(F.silu(self.into(features)))


def rotary_angles(
    length: int, head_width: int, device: torch.device, base: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, head_width/2] of position x frequency."""
    exponent = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    position = torch.arange(length, device=device, dtype=torch.float32)
    angle = torch.outer(position, base**-exponent)
    return angle.cos(), angle.sin()


def rotate(h: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn feature pairs (i, i + half) of `h` [..., length, head_width] by their angles."""
    cos, sin = angles
    first, second = h.to(torch.promote_types(h.dtype, torch.float32)).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(h.dtype)
