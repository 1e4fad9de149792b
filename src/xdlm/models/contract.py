"""What a denoiser is: a trunk that reads noisy tokens, and a head kept apart from it.

The split is what makes losses and samplers fast: both run the head on the rows they need, never on
all of them, and losses fuse a linear one with their sums over the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import wraps
from typing import ClassVar, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xdlm.errors import UserError
from xdlm.ops.device import no_autocast
from xdlm.ops.gather import take_rows
from xdlm.ops.head import Guide
from xdlm.structs import RowStats, Vocab

P = ParamSpec("P")
R = TypeVar("R")
#: A layer's keys and values [B, heads, l, d] on their way into attention, and those, of as many positions
#: as one likes, that attention sees in their place; and the same for all layers, by number.
KeyValueExchange = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Exchange = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class BackboneConfig:
    """What describes a backbone: a frozen dataclass with a `kind` to be known by. What is said here holds
    for those that say nothing else."""

    kind: ClassVar[str]
    #: Fields that may change between a run and another that starts with its weights.
    free: ClassVar[tuple[str, ...]] = (
        "dropout", "label_dropout", "time_conditioning", "time_scale",
    )  # fmt: skip
    n_classes = 0
    label_dropout = 0.0
    time_conditioning = False

    def own_vocab(self) -> Vocab | None:
        """The vocabulary that a backbone brings along; None where the tokenizer decides."""
        return None

    def own_length(self) -> int | None:
        """The number of tokens in a row, where a backbone takes no other; None where it takes any."""
        return None

    def start(self) -> str | None:
        """Where the first weights come from, unless a recipe says otherwise; None for random ones."""
        return None


class Denoiser(nn.Module, ABC):
    """Predicts clean tokens from noisy ones."""

    #: Whether the launches of the trunk, or of its body, may be recorded and replayed (`graphed`): only if
    #: it never waits for the GPU and does the same whatever the values of its inputs.
    replayable: bool = False
    #: Whether `head` is `hidden @ head_weight.T + head_bias`. Any other is a function without weights.
    linear_head: bool = True
    #: Whether the trunk may use kernels that were written for it, where they can run.
    kernels: bool = True
    #: Whether a position sees itself and those before it alone. Its prediction is then of the next token,
    #: and the times play no part.
    causal: bool = False
    #: Classes that `label` may name; 0 for none.
    n_classes: int = 0
    #: Whether `trunk` takes `padding` [B, L], true where there is no token and nobody must look.
    takes_padding: bool = False
    #: How many positions before one its state is taken from: 1 where a state is of the next token.
    lag: int = 0

    @abstractmethod
    def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        """Hidden states [B, L, D] for tokens `z` [B, L] at times `t` [B] in [0, 1].

        `label` [B] holds class ids; -1 stands for "no class".
        """

    def body(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> tuple[Tensor, ...]:
        """The trunk up to where positions have looked at each other for the last time: what `finish` makes
        hidden states of. All of it, unless a backbone knows better."""
        return (self.trunk(z, t, label),)

    def finish(self, states: tuple[Tensor, ...], rows: Tensor | None) -> Tensor:
        """Hidden states [R, D] at `rows` [R] of all positions, distinct ones, or at all of them, from what
        `body` gave, which may be written over."""
        hidden = states[0].flatten(0, 1)
        return hidden if rows is None else take_rows(hidden, rows)

    def trunk_at(self, z: Tensor, t: Tensor, start: int, exchange: Exchange) -> Tensor:
        """Hidden states [B, l, D] of a stretch `z` [B, l] of longer rows, from position `start` on, with
        every layer's keys and values passed through `exchange`. The first `lag` of them are not to be used,
        unless the stretch begins the rows."""
        raise UserError("this backbone cannot be run on a part of a row: leave refresh out")

    @property
    def head_weight(self) -> Tensor:
        """[V, D], of a linear head"""
        raise UserError("this backbone has no linear head, and what was asked for needs one")

    @property
    def head_bias(self) -> Tensor | None:
        """[V] or None, of a linear head"""
        raise UserError("this backbone has no linear head, and what was asked for needs one")

    @property
    def n_states(self) -> int:
        """V, the number of logits."""
        return len(self.head_weight)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def replay_state(self) -> list[Tensor]:
        """Every tensor that the trunk reads, beside its inputs."""
        return [*self.parameters(), *self.buffers()]

    def replay_mode(self) -> Hashable:
        """What else decides what the trunk does."""
        return tuple(module.training for module in self.modules())

    def flops_per_token(self, length: int, head_share: float = 1.0) -> float | None:
        """Operations that training takes per token in rows of `length`, forward and backward, with the
        head on this share of the positions; None where a backbone does not count them."""
        return None

    def head(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., V] for any subset of hidden rows."""
        bias = None if self.head_bias is None else self.head_bias.float()
        with no_autocast(hidden):
            return F.linear(hidden.float(), self.head_weight.float(), bias)

    def has_kernel_for(self, hidden: Tensor) -> bool:
        """Whether `own_stats` of such states is a kernel that can run where they are."""
        return False

    def own_stats(
        self, hidden: Tensor, x: Tensor, z: Tensor, log_c: Tensor | None
    ) -> RowStats | None:
        """The statistics of rows `hidden` [..., D] of a head that is not linear, by a shorter way than
        through all logits; None where there is none."""
        return None

    def own_draws(
        self, hidden: Tensor, uniform: Tensor, z: Tensor, guide: Guide | None
    ) -> tuple[Tensor, Tensor] | None:
        """Draws from rows `hidden` [R, D] and the probabilities of `z` [R], as `RowDraws.draw` has them, by
        a shorter way than through all logits; None where there is none."""
        return None

    def forward(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        """All logits at once, [B, L, V]: for inspection; losses and samplers use the two parts."""
        return self.head(self.trunk(z, t, label))


def in_eval_mode(
    function: Callable[Concatenate[Denoiser, P], R],
) -> Callable[Concatenate[Denoiser, P], R]:
    """What is asked of a denoiser, without its dropout; a model in training goes on as it was."""

    @wraps(function)
    def asked(denoiser: Denoiser, *args: P.args, **kwargs: P.kwargs) -> R:
        if not denoiser.training:
            return function(denoiser, *args, **kwargs)
        modes = {module: module.training for module in denoiser.modules()}
        denoiser.eval()
        try:
            return function(denoiser, *args, **kwargs)
        finally:
            for module, was in modes.items():
                module.training = was

    return asked


def refuse_labels(label: Tensor | None) -> None:
    """For backbones that know no classes."""
    if label is not None:
        raise UserError("this model was built without classes")
