"""Float32 weights, a trunk of lower precision: the model is run on a cast copy of its weights.

The optimiser, the averages and the checkpoints only ever see the float32 weights, and gradients are
added up in float32. Nothing inside the model decides about precision.
"""

from __future__ import annotations

import copy

import torch

from xdlm.models import Denoiser


class WorkingCopy:
    """The model to run: the weights themselves in float32, or a copy in another dtype."""

    def __init__(self, master: Denoiser, dtype: torch.dtype) -> None:
        self._master = master
        self.model = master if dtype == torch.float32 else copy.deepcopy(master).to(dtype)

    @property
    def is_master(self) -> bool:
        return self.model is self._master

    def refresh(self) -> None:
        """Take over the weights after an optimiser step."""
        if not self.is_master:
            with torch.no_grad():
                torch._foreach_copy_(list(self.model.parameters()), list(self._master.parameters()))

    def collect(self) -> None:
        """Add the copy's gradients to those of the float32 weights, and clear them."""
        if self.is_master:
            return
        for own, copied in zip(self._master.parameters(), self.model.parameters(), strict=True):
            if copied.grad is None:
                continue
            if own.grad is None:
                own.grad = copied.grad.to(own.dtype)
            else:
                own.grad += copied.grad
            copied.grad = None
