"""A trunk's many small launches, or its body's, recorded once as a CUDA graph and replayed as one.

Launching costs a CPU some ten microseconds each, and a trunk has hundreds forward and again backward;
on a fast GPU that is longer than the work itself. A recording belongs to one shape, one mode and one set of
weights: it reads them where they are, so their values may change in place, and a call that finds anything
else about them changed makes a recording of its own. Hooks of modules do not run in a replay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from xdlm.errors import UserError
from xdlm.models.contract import Denoiser

#: Recordings kept for a model, each with memory of its own; and calls remembered that may repeat.
_KEPT, _REMEMBERED = 4, 32


def run_trunk(
    denoiser: Denoiser,
    z: Tensor,
    t: Tensor,
    label: Tensor | None = None,
    padding: Tensor | None = None,
) -> Tensor:
    """`denoiser.trunk(z, t, label)`, replayed from the second equal call on where the model allows it.
    What is returned may be overwritten by the next call: use it first. `padding` [B, L] is true where there
    is no token: for models that take it, and never replayed."""
    if padding is not None:
        return denoiser.trunk(z, t, label, padding=padding)  # type: ignore[call-arg]
    return _run(denoiser, _trunk, z, t, label)[0]


def run_body(
    denoiser: Denoiser, z: Tensor, t: Tensor, label: Tensor | None = None
) -> tuple[Tensor, ...]:
    """`denoiser.body(z, t, label)` in the same way, for `denoiser.finish`."""
    return _run(denoiser, _body, z, t, label)


#: What is recorded: a part of a model.
Part = Callable[[Denoiser, Tensor, Tensor, Tensor | None], tuple[Tensor, ...]]


def _trunk(denoiser: Denoiser, z: Tensor, t: Tensor, label: Tensor | None) -> tuple[Tensor, ...]:
    return (denoiser.trunk(z, t, label),)


def _body(denoiser: Denoiser, z: Tensor, t: Tensor, label: Tensor | None) -> tuple[Tensor, ...]:
    return denoiser.body(z, t, label)


def _run(
    denoiser: Denoiser, part: Part, z: Tensor, t: Tensor, label: Tensor | None
) -> tuple[Tensor, ...]:
    if not _can_replay(denoiser, z):
        return part(denoiser, z, t, label)
    memory = _MEMORIES.setdefault(denoiser, _Memory())
    key = (part, _key(denoiser, z, t, label))
    recording = memory.find(key)
    if recording is None and memory.seen_before(key):
        with torch.cuda.device(z.device):
            recording = memory.keep(key, _record(denoiser, part, z, t, label))
    return part(denoiser, z, t, label) if recording is None else recording(z, t, label)


def release_recordings(denoiser: Denoiser) -> None:
    """Give the memory of a model's recordings back."""
    _MEMORIES.pop(denoiser, None)


def release_workspaces() -> None:
    """Give back what the library of matrix products keeps for every stream and thread that it has seen, and
    every model's recordings, which would write there."""
    _MEMORIES.clear()
    _recording_stream.cache_clear()
    torch._C._cuda_clearCublasWorkspaces()


def _can_replay(denoiser: Denoiser, z: Tensor) -> bool:
    """Not under autocast, whose copies of weights come and go; nor where `trunk` has been replaced."""
    return (
        z.is_cuda
        and denoiser.replayable
        and "trunk" not in vars(denoiser)
        and not torch.is_autocast_enabled("cuda")
        and not torch.cuda.is_current_stream_capturing()
    )


def _key(denoiser: Denoiser, z: Tensor, t: Tensor, label: Tensor | None) -> Hashable:
    """All that a recording depends on beside the values of its inputs."""
    state = tuple((s.data_ptr(), s.dtype, s.requires_grad) for s in denoiser.replay_state())
    inputs = tuple(None if given is None else (given.shape, given.dtype) for given in (z, t, label))
    mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), denoiser.replay_mode())
    return inputs, mode, state


def _record(
    denoiser: Denoiser, part: Part, z: Tensor, t: Tensor, label: Tensor | None
) -> _Recording | _TrainRecording | None:
    """None where there is not enough memory for one."""
    train = torch.is_grad_enabled() and any(p.requires_grad for p in denoiser.parameters())
    try:
        return (_TrainRecording if train else _Recording)(denoiser, part, z, t, label)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: the library of matrix products keeps a workspace for every stream it has
    seen, and asks for it here, so that it belongs to no recording."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda.current_blas_handle()
    return stream


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

    def __init__(
        self, denoiser: Denoiser, part: Part, z: Tensor, t: Tensor, label: Tensor | None
    ) -> None:
        self._inputs, self._graph = _Inputs(z, t, label), torch.cuda.CUDAGraph()
        self._state = denoiser.replay_state()  # held, so that what the graph reads is not freed
        with torch.cuda.graph(self._graph, stream=_recording_stream(z.device)):
            self._states = part(denoiser, *self._inputs.tensors)

    def __call__(self, z: Tensor, t: Tensor, label: Tensor | None) -> tuple[Tensor, ...]:
        self._inputs.fill(z, t, label)
        self._graph.replay()
        return self._states


class _TrainRecording:
    """Forward and backward, as two graphs that share their memory."""

    def __init__(
        self, denoiser: Denoiser, part: Part, z: Tensor, t: Tensor, label: Tensor | None
    ) -> None:
        self._inputs, self._state = _Inputs(z, t, label), denoiser.replay_state()
        self.runs = 0
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Leaves of their own over the same memory: those of the model may still belong to the graph of
        # an earlier pass, and to its stream.
        leaves = {
            name: p.detach().requires_grad_(p.requires_grad)
            for name, p in denoiser.named_parameters()
        }
        trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
        module, stream = _PartOf(denoiser, part), _recording_stream(z.device)
        pool = torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        # What a first backward pass loads cannot be loaded below. What it draws must change nothing.
        with torch.cuda.stream(stream), torch.random.fork_rng([z.device]):
            states = functional_call(module, leaves, self._inputs.tensors)
            reached = [state for state in states if state.requires_grad]
            if reached:
                torch.autograd.grad(
                    reached, trained, [state.detach() for state in reached], allow_unused=True
                )
        torch.cuda.current_stream().wait_stream(stream)
        del states, reached
        with torch.cuda.graph(self.forward_graph, pool=pool, stream=stream):
            states = functional_call(module, leaves, self._inputs.tensors)
        gradients: tuple[Tensor | None, ...] = (None,) * len(trained)
        self.states = tuple(state.detach() for state in states)
        #: Upstream gradients, None where there is none.
        self.d_states = [torch.empty_like(s) if s.requires_grad else None for s in states]
        reached = [state for state in states if state.requires_grad]
        if reached:
            upstream = [d for d in self.d_states if d is not None]
            with torch.cuda.graph(self.backward_graph, pool=pool, stream=stream):
                gradients = torch.autograd.grad(reached, trained, upstream, allow_unused=True)
        # Others may have gradients from elsewhere, which shall not wait for these.
        with_gradient = [p for p in denoiser.parameters() if p.requires_grad]
        found = [(p, g) for p, g in zip(with_gradient, gradients, strict=True) if g is not None]
        self._parameters, self.gradients = [p for p, _ in found], [g for _, g in found]

    def __call__(self, z: Tensor, t: Tensor, label: Tensor | None) -> tuple[Tensor, ...]:
        self._inputs.fill(z, t, label)
        if self._parameters:
            return _Replay.apply(self, *self._parameters)
        self.forward_graph.replay()
        return self.states


class _PartOf(nn.Module):
    """The part as a module's forward, with the denoiser's own names of parameters."""

    def __init__(self, denoiser: Denoiser, part: Part) -> None:
        super().__init__()
        self.__dict__.update(_modules=denoiser._modules, _parameters=denoiser._parameters)
        self._part = partial(part, denoiser)

    def forward(self, z: Tensor, t: Tensor, label: Tensor | None) -> tuple[Tensor, ...]:
        return self._part(z, t, label)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: _TrainRecording, *parameters: Tensor) -> tuple[Tensor, ...]:
        recording.forward_graph.replay()
        recording.runs += 1
        ctx.recording, ctx.run = recording, recording.runs
        states = tuple(state.view_as(state) for state in recording.states)
        ctx.mark_non_differentiable(
            *(s for s, d in zip(states, recording.d_states, strict=True) if d is None)
        )
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        recording: _TrainRecording = ctx.recording
        if ctx.run != recording.runs:
            raise UserError(
                "a recorded trunk keeps one pass: run backward once, before the next forward"
            )
        recording.runs += 1  # the backward graph uses the memory of the forward one
        for own, given in zip(recording.d_states, upstream, strict=True):
            if own is not None:
                own.copy_(given)
        recording.backward_graph.replay()
        copies = [torch.empty_like(g) for g in recording.gradients]
        torch._foreach_copy_(copies, recording.gradients)  # in a few launches instead of one each
        return (None, *copies)


class _Memory:
    """A model's recordings, the least recently used first, and the calls that were seen once."""

    def __init__(self) -> None:
        self._recordings: OrderedDict[Hashable, _Recording | _TrainRecording] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def find(self, key: Hashable) -> _Recording | _TrainRecording | None:
        if key in self._recordings:
            self._recordings.move_to_end(key)
        return self._recordings.get(key)

    def seen_before(self, key: Hashable) -> bool:
        seen = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return seen

    def keep(
        self, key: Hashable, recording: _Recording | _TrainRecording | None
    ) -> _Recording | _TrainRecording | None:
        if recording is None:  # no memory for it: start counting again
            self._seen.pop(key, None)
            return None
        self._recordings[key] = recording
        if len(self._recordings) > _KEPT:
            dropped, _ = self._recordings.popitem(last=False)
            self._seen.pop(dropped, None)  # it would be recorded again at its next call
        return recording


_MEMORIES: WeakKeyDictionary[Denoiser, _Memory] = WeakKeyDictionary()
