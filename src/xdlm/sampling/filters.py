"""Reshaping of predictions before a draw: temperature and nucleus (top-p)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xdlm.errors import UserError, check_number
from xdlm.ops.rows import work_dtype


@dataclass(frozen=True)
class Filter:
    """Temperature first, then top-p. The defaults leave a prediction as it is."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Keeps the most likely tokens that together reach this probability."""

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        check_number("top_p", self.top_p)
        if self.temperature != 0 and not 1e-3 <= self.temperature <= 1e3:
            raise UserError(
                f"temperature must be 0 or lie in [0.001, 1000], got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], got {self.top_p}")

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits.to(work_dtype(logits.dtype))
        if self.temperature == 0:
            best = logits.argmax(-1, keepdim=True)
            return torch.full_like(logits, -torch.inf).scatter_(-1, best, 0.0)
        if self.temperature != 1:
            logits = logits / self.temperature
        if self.top_p == 1:
            return logits
        probs, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        # A token stays while those before it have not reached p: the one that crosses p stays too, and
        # the first one always, however small p is in the precision of the logits.
        drop = probs.cumsum(-1) - probs >= self.top_p
        drop[..., 0] = False
        return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
