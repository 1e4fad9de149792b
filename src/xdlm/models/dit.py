"""The diffusion transformer of the paper: rotary positions, adaptive layer norm, untied head.

The layout follows the DiT that SEDD and MDLM use for text (Lou et al. 2023, Sahoo et al. 2024):
norms without bias, qkv and output projections without bias, an MLP with biases and tanh-GELU, and
modulation and head that start at zero, so that an untrained model predicts the uniform law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xdlm.errors import UserError
from xdlm.models.contract import BackboneConfig, Denoiser, Exchange
from xdlm.models.layers import (
    AdaptiveNorm,
    Angles,
    Block,
    Branch,
    How,
    TimeEmbedding,
    has_hooks,
    kernels_can_run,
    rotary_angles,
)
from xdlm.ops.gather import take_rows
from xdlm.ops.padding import make_room


@dataclass(frozen=True)
class DiTConfig(BackboneConfig):
    """The shape of a DiT."""

    kind: ClassVar[str] = "dit"

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
    time_scale: float = 1000.0
    """Times in [0, 1] are spread over this range, so that the sinusoids resolve them."""
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
    "pocket": DiTConfig(depth=6, width=288, heads=6, cond_width=16, dropout=0.0),
    "nano": DiTConfig(depth=2, width=64, heads=2, cond_width=16, dropout=0.0),
}


class DiT(Denoiser):
    """A `Denoiser` for token sequences of any length."""

    replayable = True

    def __init__(self, config: DiTConfig, vocab_size: int, *, causal: bool = False) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.n_classes = config.n_classes
        self.embed = nn.Embedding(vocab_size, config.width)
        bound = 1 / math.sqrt(config.width)
        nn.init.uniform_(self.embed.weight, -bound, bound)
        self.time_embed = TimeEmbedding(config.cond_width, config.time_scale)
        self.label_embed = (
            nn.Embedding(config.n_classes + 1, config.cond_width) if config.n_classes else None
        )
        self.blocks = nn.ModuleList(Block(config, causal) for _ in range(config.depth))
        self.final_norm = AdaptiveNorm(config.width)
        # Shift, scale and gate of both norms of every block, shift and scale of the last: one product.
        self.modulation = nn.Linear(config.cond_width, (6 * config.depth + 2) * config.width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
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
        if self._table[0].device != self.out.weight.device:
            self._fill_table(len(self._table[0]))
        if self.out.weight.is_cuda:
            make_room(self.out.weight)
        return self

    def replay_state(self) -> list[Tensor]:
        return [*super().replay_state(), *self._table]

    def replay_mode(self) -> Hashable:
        return self.kernels, super().replay_mode()

    @property
    def head_weight(self) -> Tensor:
        return self.out.weight

    @property
    def head_bias(self) -> Tensor:
        return self.out.bias

    def flops_per_token(self, length: int, head_share: float = 1.0) -> float:
        """6 per weight that a token is multiplied with (2 forward, 4 backward), and 12 x length x width
        per layer for attention (scores and their use, each 2 x length x width forward and twice that
        backward), half of that where a token sees those before it alone. The conditioning is computed once
        per sequence, not per token, and left out, as is all that is not a product of matrices. Where the
        head does not look, the last layer does nothing behind its attention."""
        width, seen = self.config.width, length / 2 if self.causal else length
        layer = (4 + 2 * self.config.mlp_ratio) * width**2
        left_out = (1 + 2 * self.config.mlp_ratio) * width**2 if self._ends_alike() else 0
        head = head_share * len(self.head_weight) * width
        weights = self.config.depth * layer - (1 - head_share) * left_out + head
        return 6 * weights + 12 * self.config.depth * seen * width

    def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        return self._hidden(z, t, label)

    def body(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> tuple[Tensor, ...]:
        """All but what the last block does to each position by itself, where that is the same in every
        sequence and nobody has changed what blocks do. In its place, what that starts from: the stream,
        what attention found, the modulation, and what dropout goes by."""
        if not self._ends_alike():
            return super().body(z, t, label)
        run = self._start(z, t, label)
        last = self.config.depth - 1
        h, branch = self._through(islice(self.blocks, last), run, None)
        block = cast(Block, self.blocks[-1])
        given = run.modulation[6 * last :]
        h, attended, _ = block.attend(h, branch, given[:2], run.angles, run.how)
        seeds = run.seeds[last]
        return h, attended, torch.cat([*given[2:]], dim=-1), *(() if seeds is None else (seeds,))

    def finish(self, states: tuple[Tensor, ...], rows: Tensor | None) -> Tensor:
        if len(states) == 1:
            return super().finish(states, rows)
        h, attended, given, *seeds = states
        h, attended = h.flatten(0, 1), attended.flatten(0, 1)
        if rows is not None:
            h, attended = take_rows(h, rows), take_rows(attended, rows)
        modulation, how = given.split(self.config.width, dim=-1), self._how(h)
        block = cast(Block, self.blocks[-1])
        h, branch = block.think(
            h[None], attended[None], None, modulation[:4], how, seeds[0] if seeds else None
        )
        return self.final_norm(h, branch, *modulation[4:], how)[1][0]

    def _ends_alike(self) -> bool:
        """Whether the last block does the same in every sequence, and is what it was written as."""
        last, kind = self.blocks[-1], type(self)
        wrapped = "forward" in vars(last) or "trunk" in vars(self) or has_hooks(last)
        derived = kind.trunk is not DiT.trunk or kind._condition is not DiT._condition
        if wrapped or derived or type(last) is not Block or self.causal:
            return False
        return not self.config.time_conditioning and self.label_embed is None

    def trunk_at(self, z: Tensor, t: Tensor, start: int, exchange: Exchange) -> Tensor:
        if self.causal:
            raise UserError("a model that looks back alone cannot be run on a part of a row")
        return self._hidden(z, t, None, start, exchange)

    def _hidden(
        self,
        z: Tensor,
        t: Tensor,
        label: Tensor | None,
        start: int = 0,
        exchange: Exchange | None = None,
    ) -> Tensor:
        run = self._start(z, t, label, start)
        h, branch = self._through(self.blocks, run, exchange)
        return self.final_norm(h, branch, *run.modulation[-2:], run.how)[1]

    def _start(self, z: Tensor, t: Tensor, label: Tensor | None, start: int = 0) -> Start:
        cond = F.silu(self._condition(t, label))
        stop = start + z.shape[1]
        if stop > len(self._table[0]) or self._table[0].device != self.out.weight.device:
            self._fill_table(max(2 * stop, len(self._table[0])))
        angles = (self._table[0][start:stop], self._table[1][start:stop])
        modulation = self.modulation(cond).split(self.config.width, dim=-1)
        h = self.embed(z)
        how = self._how(h)
        return Start(h, modulation, angles, how, self._dropout_seeds(how.kernels))

    def _through(
        self, blocks: Iterable[nn.Module], run: Start, exchange: Exchange | None
    ) -> tuple[Tensor, Branch | None]:
        """The stream behind the first blocks, and what is yet to be added to it."""
        h, branch = run.h, None
        for i, block in enumerate(blocks):
            given = None if exchange is None else partial(exchange, i)
            modulation = run.modulation[6 * i : 6 * i + 6]
            h, branch = block(h, branch, modulation, run.angles, run.how, run.seeds[i], given)
        return h, branch

    def _how(self, h: Tensor) -> How:
        """Without gradients nobody looks at the stream again: what comes next may take its place."""
        kernels = self.kernels and kernels_can_run(h)
        return How(kernels, in_place=kernels and not torch.is_grad_enabled())

    def _dropout_seeds(self, kernels: bool) -> Sequence[Tensor | None]:
        """Two for each block, where kernels drop. From torch's generator on the device:
        `torch.manual_seed` decides, also when a recording of the trunk is replayed."""
        if not (kernels and self.training and self.config.dropout):
            return [None] * self.config.depth
        shape, device = (self.config.depth, 2), self.out.weight.device
        return torch.randint(1 << 31, shape, dtype=torch.int32, device=device).unbind()

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


class Start(NamedTuple):
    """What blocks are given: the stream, shifts, scales and gates of all of them, the angles of positions,
    and two seeds for each block to drop by, or None."""

    h: Tensor
    modulation: Sequence[Tensor]
    angles: Angles
    how: How
    seeds: Sequence[Tensor | None]
