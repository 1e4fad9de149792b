"""Averaged weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """`average <- d average + (1 - d) weights`, where d rises to `decay` as (1 + n)/(10 + n).

    The rise lets the average forget the initial weights in a short run.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {
            name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
        }

    @torch.no_grad()
    def update(self, model: nn.Module, n_updates: int) -> None:
        """Take in the weights after optimiser step number `n_updates` (counted from 1)."""
        decay = min(self.decay, (1 + n_updates) / (10 + n_updates))
        averages = list(self.average.values())
        weights = [p.detach() for p in model.parameters() if p.requires_grad]
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Run a block with the averages in place of the model's own weights."""
        weights = {n: p.detach() for n, p in model.named_parameters() if n in self.average}
        own = {name: weight.clone() for name, weight in weights.items()}
        _copy_into(weights, self.average)
        try:
            yield
        finally:
            _copy_into(weights, own)


def _copy_into(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
