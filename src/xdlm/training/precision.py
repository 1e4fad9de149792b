"""Float32 weights, a trunk of lower precision: the model is run on a cast copy of its weights.

The optimiser, the averages and the checkpoints only ever see the float32 weights, and gradients are
added up in float32. Nothing inside the model decides about precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from xdlm.models import Denoiser


class WorkingCopy:
    """The model to run: the weights themselves in float32, or a copy in another dtype. Where most are
    frozen there is no copy: these are cast, and what is trained beside them (adapters) stays as it is.

    A gradient of the copy is added to the float32 weight's as soon as the backward pass has it;
    `on_gradient` is then told of that weight.
    """

    def __init__(
        self,
        master: Denoiser,
        dtype: torch.dtype,
        on_gradient: Callable[[nn.Parameter], None] = lambda _: None,
    ) -> None:
        self._master = master
        frozen = [p for p in master.parameters() if not p.requires_grad]
        for parameter in frozen:  # nothing is added to these: they need no float32
            parameter.data = parameter.data.to(dtype)
        as_it_is = frozen or dtype == torch.float32
        self.model = master if as_it_is else copy.deepcopy(master).to(dtype)
        for own, run in zip(master.parameters(), self.model.parameters(), strict=True):
            if not own.requires_grad:
                continue
            run.register_post_accumulate_grad_hook(_collector(own, on_gradient))

    @property
    def is_master(self) -> bool:
        return self.model is self._master

    def refresh(self) -> None:
        """Take over the weights after an optimiser step."""
        if not self.is_master:
            with torch.no_grad():
                torch._foreach_copy_(list(self.model.parameters()), list(self._master.parameters()))


def _collector(
    own: nn.Parameter, on_gradient: Callable[[nn.Parameter], None]
) -> Callable[[torch.Tensor], None]:
    def collect(run: torch.Tensor) -> None:
        if run is not own and run.grad is not None:
            if own.grad is None:
                own.grad = run.grad.to(own.dtype)
            else:
                own.grad += run.grad
            run.grad = None
        on_gradient(own)

    return collect
