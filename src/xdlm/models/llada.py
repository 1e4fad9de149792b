"""LLaDA (Nie et al. 2025): a Llama trunk that looks both ways, under the names of its published weights.

RMS norms, rotary positions, a gated MLP, no biases, a head of its own. The mask is one of the tokens of its
vocabulary, and the time plays no part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xdlm.errors import UserError
from xdlm.models.contract import (
    BackboneConfig,
    Denoiser,
    Exchange,
    KeyValueExchange,
    refuse_labels,
)
from xdlm.models.layers import Angles, rotate
from xdlm.ops.attention import attention
from xdlm.structs import Vocab


@dataclass(frozen=True)
class LladaConfig(BackboneConfig):
    """The shape of a LLaDA; the defaults are those of LLaDA-8B."""

    kind: ClassVar[str] = "llada"
    free: ClassVar[tuple[str, ...]] = ("context",)

    depth: int = 32
    """Number of transformer blocks."""
    width: int = 4096
    """Size of the hidden states."""
    heads: int = 32
    """Number of attention heads."""
    mlp_width: int = 12288
    """Hidden size of the gated MLP."""
    vocab_size: int = 126464
    """Rows of the embedding and of the head, the mask and unused ones included."""
    mask_id: int = 126336
    """The token that stands for a mask."""
    context: int = 4096
    """Longest row that the model was trained on."""
    rope_theta: float = 500_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in norms."""

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.heads, self.mlp_width, self.context) < 1:
            raise UserError("a model's depth, width, heads, mlp_width and context must be >= 1")
        if self.width % (2 * self.heads):
            raise UserError(
                f"width {self.width} must be a multiple of 2 x heads ({2 * self.heads}): "
                "each head rotates pairs of features"
            )
        if not (self.rope_theta > 0 and self.norm_eps >= 0):
            raise UserError("a model's rope_theta must be > 0 and its norm_eps >= 0")
        self.own_vocab()

    def own_vocab(self) -> Vocab:
        return Vocab(self.vocab_size, self.mask_id)


class Llada(Denoiser):
    """A `Denoiser` whose parameters have the names of the published checkpoints."""

    replayable = True
    takes_padding = True

    def __init__(self, config: LladaConfig, vocab_size: int, *, causal: bool = False) -> None:
        super().__init__()
        assert vocab_size == config.vocab_size
        if causal:
            raise UserError("LLaDA looks both ways: train it under noise, not autoregressively")
        self.config = config
        self.model = nn.ModuleDict({"transformer": Parts(config)})
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        self._fill_table(min(config.context, 1024))

    @property
    def parts(self) -> Parts:
        found = self.model["transformer"]
        assert isinstance(found, Parts)
        return found

    @property
    def head_weight(self) -> Tensor:
        return self.parts.ff_out.weight

    @property
    def head_bias(self) -> None:
        return None

    def trunk(
        self, z: Tensor, t: Tensor, label: Tensor | None = None, *, padding: Tensor | None = None
    ) -> Tensor:
        refuse_labels(label)
        seen = None if padding is None else ~padding[:, None, None]
        h, angles = self.parts.wte(z), self._angles(0, z.shape[1])
        for block in self.parts.blocks:
            h = block(h, angles, seen)
        return self.parts.ln_f(h)

    def trunk_at(self, z: Tensor, t: Tensor, start: int, exchange: Exchange) -> Tensor:
        h, angles = self.parts.wte(z), self._angles(start, start + z.shape[1])
        for i, block in enumerate(self.parts.blocks):
            h = block(h, angles, None, partial(exchange, i))
        return self.parts.ln_f(h)

    def _angles(self, start: int, stop: int) -> Angles:
        if stop > len(self._table[0]) or self._table[0].device != self.head_weight.device:
            self._fill_table(max(2 * stop, len(self._table[0])))
        return self._table[0][start:stop], self._table[1][start:stop]

    def flops_per_token(self, length: int, head_share: float = 1.0) -> float:
        """As for a DiT: 6 per weight that a token is multiplied with, 12 x length x width per layer."""
        config = self.config
        layer = 4 * config.width**2 + 3 * config.width * config.mlp_width
        head = head_share * config.vocab_size * config.width
        return 6 * (config.depth * layer + head) + 12 * config.depth * length * config.width

    def _fill_table(self, length: int) -> None:
        """Angles in float32, whatever the weights are."""
        head_width, device = self.config.width // self.config.heads, self.head_weight.device
        exponent = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
        position = torch.arange(length, device=device, dtype=torch.float32)
        # A quotient, as in the published code: far from the start another rounding would show.
        angle = torch.outer(position, 1.0 / self.config.rope_theta**exponent)
        self._table: Angles = (angle.cos(), angle.sin())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Llada:
        super()._apply(fn, recurse)
        if self._table[0].device != self.head_weight.device:
            self._fill_table(len(self._table[0]))
        return self

    def replay_state(self) -> list[Tensor]:
        return [*super().replay_state(), *self._table]


class Parts(nn.Module):
    """What the published names call `model.transformer`; `ff_out` is the head."""

    def __init__(self, config: LladaConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.ln_f = nn.RMSNorm(config.width, config.norm_eps)
        self.ff_out = nn.Linear(config.width, config.vocab_size, bias=False)


class Block(nn.Module):
    """`h + attention(norm(h))`, then `h + MLP(norm(h))`."""

    def __init__(self, config: LladaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        width, inner = config.width, config.mlp_width
        self.attn_norm = nn.RMSNorm(width, config.norm_eps)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_norm = nn.RMSNorm(width, config.norm_eps)
        self.ff_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.ff_out = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        h: Tensor,
        angles: Angles,
        seen: Tensor | None,
        exchange: KeyValueExchange | None = None,
    ) -> Tensor:
        h = h + self.attn_out(self._attend(self.attn_norm(h), angles, seen, exchange))
        normed = self.ff_norm(h)
        return h + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed))

    def _attend(
        self, h: Tensor, angles: Angles, seen: Tensor | None, exchange: KeyValueExchange | None
    ) -> Tensor:
        q, k, v = (
            project(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, angles), rotate(k, angles)
        if exchange is not None:
            k, v = exchange(k, v)
        return attention(q, k, v, mask=seen).transpose(1, 2).flatten(2)
