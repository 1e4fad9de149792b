"""Averaged weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """`average <- d average + (1 - d) weights`, where d rises to `decay` as (1 + n)/(10 + n).

    The rise lets the average forget the initial weights in a short run. At a decay of 0 the weights are
    their own average, and nothing is held beside them.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self._model = decay, model
        self._kept = {name: p.clone() for name, p in _trained(model).items()} if decay else None

    @property
    def average(self) -> dict[str, Tensor]:
        """By name; to be read, or written over in place."""
        return _trained(self._model) if self._kept is None else self._kept

    @torch.no_grad()
    def update(self, model: nn.Module, n_updates: int) -> None:
        """Take in the weights after optimiser step number `n_updates` (counted from 1)."""
        if self._kept is None:
            return
        decay = min(self.decay, (1 + n_updates) / (10 + n_updates))
        weights = list(_trained(model).values())
        torch._foreach_lerp_(list(self._kept.values()), weights, 1 - decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Run a block with the averages in place of the model's own weights."""
        if self._kept is None:
            yield
            return
        weights = _trained(model)
        own = {name: weight.clone() for name, weight in weights.items()}
        _copy_into(weights, self._kept)
        try:
            yield
        finally:
            _copy_into(weights, own)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def _copy_into(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
