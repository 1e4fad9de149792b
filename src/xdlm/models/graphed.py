"""A trunk's many small launches, recorded once as a CUDA graph and replayed as one.

Launching costs a CPU some ten microseconds each, and a trunk has hundreds forward and again backward;
on a fast GPU that is longer than the work itself. A recording belongs to one shape, one set of weights
(by address: values may change in place) and one mode; the second call that asks for it makes it, the
first having warmed everything up.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from xdlm.errors import UserError
from xdlm.models.contract import Denoiser

#: Recordings kept for a model, each with memory of its own.
_KEPT = 4


def run_trunk(denoiser: Denoiser, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
    """`denoiser.trunk(z, t, label)`, replayed where the model allows it and the call repeats. What is
    returned may be overwritten by the next call: use it first."""
    if not (z.is_cuda and denoiser.replayable) or torch.cuda.is_current_stream_capturing():
        return denoiser.trunk(z, t, label)
    parameters = list(denoiser.parameters())
    train = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
    where = tuple(p.data_ptr() for p in parameters)
    key = (z.shape, label is None, denoiser.training, train, where)
    recordings = _RECORDINGS.setdefault(denoiser, {})
    if key not in recordings:
        recordings[key] = None
        while len(recordings) > _KEPT:
            recordings.pop(next(iter(recordings)))
        return denoiser.trunk(z, t, label)
    recording = recordings[key]
    if recording is None:
        kind = _TrainRecording if train else _Recording
        recording = recordings[key] = kind(denoiser, z, t, label)
    return recording(z, t, label)


class _Inputs:
    """The tensors that a recording reads, filled before each replay."""

    def __init__(self, z: Tensor, t: Tensor, label: Tensor | None) -> None:
        self.tensors: tuple[Any, ...] = tuple(
            None if given is None else given.clone() for given in (z, t, label)
        )

    def fill(self, *given: Tensor | None) -> None:
        for own, new in zip(self.tensors, given, strict=True):
            if own is not None and new is not None:
                own.copy_(new)


class _Recording:
    """Without gradients."""

    def __init__(self, denoiser: Denoiser, z: Tensor, t: Tensor, label: Tensor | None) -> None:
        self._inputs, self._graph = _Inputs(z, t, label), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._hidden = denoiser.trunk(*self._inputs.tensors)

    def __call__(self, z: Tensor, t: Tensor, label: Tensor | None) -> Tensor:
        self._inputs.fill(z, t, label)
        self._graph.replay()
        return self._hidden


class _TrainRecording:
    """Forward and backward, as two graphs that share their memory."""

    def __init__(self, denoiser: Denoiser, z: Tensor, t: Tensor, label: Tensor | None) -> None:
        self._inputs, self._parameters = _Inputs(z, t, label), list(denoiser.parameters())
        self.runs = 0
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        # Leaves of their own over the same memory: those of the model may still belong to the graph of
        # an earlier pass, and to its stream.
        leaves = {
            name: p.detach().requires_grad_(p.requires_grad)
            for name, p in denoiser.named_parameters()
        }
        with torch.cuda.graph(self.forward_graph, pool=pool):
            hidden = functional_call(_TrunkOf(denoiser), leaves, self._inputs.tensors)
        self.d_hidden = torch.empty_like(hidden)
        trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
        with torch.cuda.graph(self.backward_graph, pool=pool):
            gradients = torch.autograd.grad(hidden, trained, self.d_hidden, allow_unused=True)
        self.hidden = hidden.detach()
        found = iter(gradients)
        self.gradients = [next(found) if p.requires_grad else None for p in self._parameters]

    def __call__(self, z: Tensor, t: Tensor, label: Tensor | None) -> Tensor:
        self._inputs.fill(z, t, label)
        return _Replay.apply(self, *self._parameters)


class _TrunkOf(nn.Module):
    """The trunk as a module's forward, with the denoiser's own names of parameters."""

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.__dict__.update(_modules=denoiser._modules, _parameters=denoiser._parameters)
        self._trunk = denoiser.trunk

    def forward(self, z: Tensor, t: Tensor, label: Tensor | None) -> Tensor:
        return self._trunk(z, t, label)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: _TrainRecording, *parameters: Tensor) -> Tensor:
        recording.forward_graph.replay()
        recording.runs += 1
        ctx.recording, ctx.run = recording, recording.runs
        return recording.hidden.view_as(recording.hidden)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        recording: _TrainRecording = ctx.recording
        if ctx.run != recording.runs:
            raise UserError("a recorded trunk keeps one pass: run backward before the next forward")
        recording.d_hidden.copy_(upstream[0])
        recording.backward_graph.replay()
        # Still held by the recording, so that autograd copies them instead of keeping them.
        return (None, *recording.gradients)


_RECORDINGS: WeakKeyDictionary[
    Denoiser, dict[tuple[Any, ...], _Recording | _TrainRecording | None]
] = WeakKeyDictionary()
