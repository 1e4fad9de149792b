"""Weights sharded over all processes (FSDP2), applied to a model from outside."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from xdlm.models import Denoiser
from xdlm.training.blocks import blocks_of
from xdlm.training.device import place

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    class ShardedDenoiser(FSDPModule, Denoiser):
        """What a denoiser is once it has been sharded."""


def shard(denoiser: Denoiser, precision: torch.dtype, device: torch.device) -> ShardedDenoiser:
    """Give every process a float32 part of each weight. A block is gathered in `precision` when it runs
    and dropped after; gradients are added up, not averaged, in float32.

    All that is not in a block, the head above all, belongs to the whole model, which runs as its `trunk`:
    it is gathered there and stays until the backward pass is through, so that losses find the head's
    weights as they do in any model, and their gradients come in the same way. Memory is taken after a model
    has been sharded: of one on the meta device, no process ever holds more than its part.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Times and angles keep their own precision: modules cast nothing.
    policy = MixedPrecisionPolicy(
        param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in blocks_of(denoiser):
        block.forward = _keeping_its_weights(block.forward)
    for module in (*blocks_of(denoiser), denoiser):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    place(denoiser, device)
    register_fsdp_forward_method(denoiser, "trunk")
    # What a block returns may be a view: a trap for those who change it in place, and nobody does.
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module .* returned a view", module="torch.distributed"
    )
    return denoiser  # type: ignore[return-value]


def _keeping_its_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block may hand a weight on, for a kernel of the next one to use: by then it is gone, so a copy
    goes in its place."""
    from torch.utils._pytree import tree_map_only

    def run(*args: Any, **named: Any) -> Any:
        return tree_map_only(nn.Parameter, torch.clone, forward(*args, **named))

    return run


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; asked this way because importing them takes half a second."""
    return hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, if it is not sharded."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def part_like(sharded: Tensor, whole: Tensor) -> Tensor:
    """A tensor that every process has, sharded as another one is, without any talk between them."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(sharded, DTensor)
    return distribute_tensor(
        whole.to(sharded.device), sharded.device_mesh, sharded.placements, src_data_rank=None
    )
