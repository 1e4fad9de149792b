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
            name: p.detach().clone() for name, p in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, model: nn.Module, n_updates: int) -> None:
        """Take in the weights after optimiser step number `n_updates` (counted from 1)."""
        decay = min(self.decay, (1 + n_updates) / (10 + n_updates))
        averages = list(self.average.values())
        weights = [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Run a block with the averages in place of the model's own weights."""
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        _copy_into(model, self.average)
        try:
            yield
        finally:
            _copy_into(model, own)


@torch.no_grad()
def _copy_into(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
