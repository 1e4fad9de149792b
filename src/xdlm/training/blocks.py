"""What is done to a model's repeated blocks from outside: the model knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from xdlm.models import Denoiser
from xdlm.training.device import COMPILER_OPTIONS


def blocks_of(denoiser: Denoiser) -> list[nn.Module]:
    """The parts that a model is a sequence of: the members of its lists of modules, those of inner lists
    before those that hold them, as sharding needs it."""
    lists = [module for module in denoiser.modules() if isinstance(module, nn.ModuleList)]
    return [block for each in reversed(lists) for block in each]


def compile_blocks(denoiser: Denoiser) -> None:
    """Run every block through torch.compile, one compilation for all: for where something has to happen
    between them, so that the trunk cannot be compiled as a whole."""
    denoiser.replayable = denoiser.kernels = False  # a compiler makes kernels of its own
    for block in blocks_of(denoiser):
        block.forward = torch.compile(block.forward, options=COMPILER_OPTIONS)


def checkpoint_blocks(denoiser: Denoiser) -> None:
    """Keep only the blocks' inputs for the backward pass, and run each block again when it gets there,
    with the same dropout."""
    denoiser.replayable = False  # a recording cannot set the generator back
    for block in blocks_of(denoiser):
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    again = partial(checkpoint, forward, use_reentrant=False)

    @wraps(forward)
    def run(*args: Any, **named: Any) -> Any:
        return (again if torch.is_grad_enabled() else forward)(*args, **named)

    return run
