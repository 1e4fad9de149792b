"""What a DiT is made of, and others use too: block, norm, rotary positions, the embedding of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xdlm.models.contract import KeyValueExchange
from xdlm.ops.attention import attention
from xdlm.ops.device import has_triton

if TYPE_CHECKING:
    from xdlm.models.dit import DiTConfig

#: Cosine and sine [length, head_width/2] of every position's angles.
Angles = tuple[Tensor, Tensor]


class How(NamedTuple):
    """With Triton kernels or in plain torch; with results in the place of what they came from or not."""

    kernels: bool
    in_place: bool


class Branch(NamedTuple):
    """What a block has yet to add to the stream: `gate * dropout(value + bias)`. The sum is left to the
    norm that reads it, since one kernel does both; `seed` [1] is what that kernel drops by."""

    value: Tensor
    bias: Tensor | None
    gate: Tensor
    dropout: float
    seed: Tensor | None


class Block(nn.Module):
    """Attention and MLP, each normed, modulated, gated and added back."""

    def __init__(self, config: DiTConfig, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = config.heads, config.dropout, causal
        width, inner = config.width, config.width * config.mlp_ratio
        self.attn_norm = AdaptiveNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = AdaptiveNorm(width)
        self.mlp_in = nn.Linear(width, inner)
        self.mlp_out = nn.Linear(inner, width)

    def forward(
        self,
        h: Tensor,
        branch: Branch | None,
        modulation: Sequence[Tensor],
        angles: Angles,
        how: How,
        seeds: Tensor | None,
        exchange: KeyValueExchange | None = None,
    ) -> tuple[Tensor, Branch]:
        """The stream before the MLP's output is added to it, and that output; `modulation` is shift, scale
        and gate of attention and of the MLP."""
        h, attended, room = self.attend(h, branch, modulation[:2], angles, how, exchange)
        return self.think(h, attended, room, modulation[2:], how, seeds)

    def attend(
        self,
        h: Tensor,
        branch: Branch | None,
        modulation: Sequence[Tensor],
        angles: Angles,
        how: How,
        exchange: KeyValueExchange | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The stream with the branch added, what each position finds at the others, and memory that may be
        written over; `modulation` is shift and scale."""
        h, normed = self.attn_norm(h, branch, *modulation, how)
        q, k, v = self._queries_keys_values(normed, angles, how)
        if exchange is not None:
            k, v = exchange(k, v)
        attended = attention(q, k, v, causal=self.causal)
        return h, attended.transpose(1, 2).flatten(2), normed if how.in_place else None

    def think(
        self,
        h: Tensor,
        attended: Tensor,
        room: Tensor | None,
        modulation: Sequence[Tensor],
        how: How,
        seeds: Tensor | None,
    ) -> tuple[Tensor, Branch]:
        """The stream before the MLP's output is added to it, and that output; `modulation` is the gate of
        attention, and shift, scale and gate of the MLP."""
        dropout = self.dropout if self.training else 0.0
        gate, shift, scale, mlp_gate = modulation
        seed, mlp_seed = (None, None) if seeds is None else seeds.split(1)
        found = Branch(self._projected(attended, room), None, gate, dropout, seed)
        h, normed = self.mlp_norm(h, found, shift, scale, how)
        value, bias = self._mlp(normed, how)
        return h, Branch(value, bias, mlp_gate, dropout, mlp_seed)

    def _queries_keys_values(self, h: Tensor, angles: Angles, how: How) -> Sequence[Tensor]:
        if how.kernels and _is_plain(self.qkv):
            from xdlm.ops.fused_rotary import fused_qkv

            return fused_qkv(h, self.qkv.weight, *angles, self.heads)
        qkv = self.qkv(h).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        return rotate(q, angles), rotate(k, angles), v

    def _projected(self, attended: Tensor, room: Tensor | None) -> Tensor:
        if room is None or not _is_plain(self.attn_out):
            return self.attn_out(attended)
        rows = attended.flatten(0, 1)
        return torch.mm(rows, self.attn_out.weight.T, out=room.flatten(0, 1)).view_as(room)

    def _mlp(self, h: Tensor, how: How) -> tuple[Tensor, Tensor | None]:
        """The output, and a bias that is still to be added to it."""
        if how.kernels and _is_plain(self.mlp_in) and _is_plain(self.mlp_out):
            from xdlm.ops.fused_mlp import fused_mlp

            weights = (self.mlp_in.weight, self.mlp_in.bias, self.mlp_out.weight)
            return fused_mlp(h, *weights, in_place=how.in_place), self.mlp_out.bias
        return self.mlp_out(F.gelu(self.mlp_in(h), approximate="tanh")), None


class AdaptiveNorm(nn.Module):
    """Layer norm, then a scale and a shift that the conditioning vector decides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(
        self, h: Tensor, branch: Branch | None, shift: Tensor, scale: Tensor, how: How
    ) -> tuple[Tensor, Tensor]:
        """The stream with the branch added, and its modulated norm."""
        if how.kernels:
            from xdlm.ops.fused_norm import fused_adaptive_norm

            return fused_adaptive_norm(
                h, self.norm.weight, scale, shift, branch=branch, eps=self.norm.eps,
                in_place=how.in_place,
            )  # fmt: skip
        if branch is not None:
            value = branch.value if branch.bias is None else branch.value + branch.bias
            h = h + branch.gate[:, None] * F.dropout(value, branch.dropout)
        return h, self.norm(h) * (1 + scale[:, None]) + shift[:, None]


def kernels_can_run(h: Tensor) -> bool:
    """Whether the Triton kernels can do the trunk's small steps. A compiler makes its own, and autocast
    changes types where a kernel does not look."""
    known = h.dtype in (torch.float32, torch.bfloat16, torch.float16)
    outside = not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cuda"))
    # The last question looks at the machine, where a compiler cannot follow.
    return outside and h.is_cuda and known and has_triton()


def _is_plain(layer: nn.Module) -> bool:
    """A linear layer that does no more than that: not wrapped by an adapter, without hooks."""
    return type(layer) is nn.Linear and not has_hooks(layer)


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


class TimeEmbedding(nn.Module):
    """Sinusoids of the time, then a small MLP."""

    N_FREQUENCIES = 128

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.into = nn.Linear(2 * self.N_FREQUENCIES, width)
        self.out = nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        exponent = torch.arange(self.N_FREQUENCIES, device=t.device) / self.N_FREQUENCIES
        angle = (t[:, None] * self.scale).float() * torch.exp(-math.log(10_000) * exponent)
        features = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.into.weight.dtype)
        return self.out(F.silu(self.into(features)))


def rotary_angles(
    length: int, head_width: int, device: torch.device, base: float = 10_000.0
) -> Angles:
    """Cosine and sine [length, head_width/2] of position x frequency."""
    exponent = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    position = torch.arange(length, device=device, dtype=torch.float32)
    angle = torch.outer(position, base**-exponent)
    return angle.cos(), angle.sin()


def rotate(h: Tensor, angles: Angles) -> Tensor:
    """Turn feature pairs (i, i + half) of `h` [..., length, head_width] by their angles."""
    cos, sin = angles
    first, second = h.to(torch.promote_types(h.dtype, torch.float32)).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(h.dtype)
