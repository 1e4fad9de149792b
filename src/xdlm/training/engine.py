"""What a process holds of the model, and how gradients come together: two ways behind one face.

`Replicated` (ddp, and one process alone): every process holds all weights. `Sharded` (fsdp): every process
holds a part of each, and the whole of a block only while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xdlm.config import TrainConfig
from xdlm.models import Denoiser
from xdlm.models.graphed import release_recordings
from xdlm.training.blocks import checkpoint_blocks, compile_blocks
from xdlm.training.device import compile_trunk, place
from xdlm.training.parallel import World
from xdlm.training.precision import WorkingCopy
from xdlm.training.sharding import shard

#: Numbers that are added up over the network at a time.
_BUCKET = 1 << 24


class Engine(Protocol):
    """Runs a model whose float32 weights the optimiser holds."""

    sharded: bool

    @property
    def running(self) -> Denoiser:
        """The model to compute losses with."""

    def refresh(self) -> None:
        """Before a step: take over the weights that the optimiser left."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add a micro batch's gradients. The `last` one of a step leaves sums over all processes."""

    def total(self, part: Tensor) -> Tensor:
        """A sum over weights or gradients, from the sum over what this process holds of them."""

    def release(self) -> None:
        """After passes without gradients: give back what they gathered."""


def make_engine(
    model: Denoiser, config: TrainConfig, precision: torch.dtype, device: torch.device, world: World
) -> Engine:
    """Place `model` on its device, sharded if that was asked for and there is anybody to share with."""
    if config.parallel == "fsdp" and world.size > 1:
        _wrap_blocks(model, config, compile_blocks)
        return Sharded(model, precision, device)
    place(model, device)
    engine = Replicated(model, precision, world)
    whole = not config.activation_checkpointing
    _wrap_blocks(engine.running, config, compile_trunk if whole else compile_blocks)
    return engine


def _wrap_blocks(
    model: Denoiser, config: TrainConfig, compiler: Callable[[Denoiser], None]
) -> None:
    if config.compile:
        compiler(model)
    if config.activation_checkpointing:
        checkpoint_blocks(model)


class Replicated:
    """All weights on every process, and a copy of lower precision to run."""

    sharded = False

    def __init__(self, model: Denoiser, precision: torch.dtype, world: World) -> None:
        self._master = model
        trained = [p for p in model.parameters() if p.requires_grad]
        self._sum = GradientSum(trained) if world.size > 1 else None
        self.working = WorkingCopy(model, precision, self._arrived)
        self._last = False

    @property
    def running(self) -> Denoiser:
        return self.working.model

    def refresh(self) -> None:
        self.working.refresh()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._last = last
        loss.backward()
        if last and self._sum is not None:
            self._sum.finish()

    def total(self, part: Tensor) -> Tensor:
        return part

    def release(self) -> None:
        if not self.working.is_master:  # nobody else runs the float32 weights
            release_recordings(self._master)

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._last and self._sum is not None:
            self._sum.arrived(parameter)


class Sharded:
    """A part of every weight on every process. Passes without gradients, too, are for all of them at once,
    and run in the precision of training."""

    sharded = True

    def __init__(self, model: Denoiser, precision: torch.dtype, device: torch.device) -> None:
        self._model = shard(model, precision, device)

    @property
    def running(self) -> Denoiser:
        return self._model

    def refresh(self) -> None:
        return None

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._model.set_requires_gradient_sync(last)
        loss.backward()

    def total(self, part: Tensor) -> Tensor:
        dist.all_reduce(part)
        return part

    def release(self) -> None:
        self._model.reshard()


class GradientSum:
    """Gradients added up over processes while the backward pass goes on.

    Weights form buckets, the last of them first, since their gradients come first. A bucket is sent when
    it and all before it are complete: the order is the same everywhere, whatever comes when. A trunk that
    is replayed as a CUDA graph has all its gradients at its end; then only those of the head, and of what
    is finished for its rows alone, travel meanwhile.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._buckets = list(_buckets(reversed(parameters)))
        self._place = {p: i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._reset()

    def _reset(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sent: list[tuple[list[Tensor], Tensor, dist.Work]] = []
        self._next = 0

    def arrived(self, parameter: nn.Parameter) -> None:
        """A weight's gradient is complete."""
        self._missing[self._place[parameter]] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            self._send()

    def finish(self) -> None:
        """Send the rest, in which weights had no part in the loss, and wait for all sums."""
        while self._next < len(self._buckets):
            self._send()
        for gradients, flat, work in self._sent:
            work.wait()
            sums = flat.split([gradient.numel() for gradient in gradients])
            views = [part.view_as(g) for part, g in zip(sums, gradients, strict=True)]
            torch._foreach_copy_(gradients, views)
        self._reset()

    def _send(self) -> None:
        gradients = [p.grad for p in self._buckets[self._next] if p.grad is not None]
        self._next += 1
        if gradients:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._sent.append((gradients, flat, dist.all_reduce(flat, async_op=True)))


def _buckets(parameters: Iterator[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    filled = 0
    for parameter in parameters:
        if bucket and filled + parameter.numel() > _BUCKET:
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled += parameter.numel()
    if bucket:
        yield bucket
