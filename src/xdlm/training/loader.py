"""The batches of each step, read by a thread while the model is busy with the step before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from xdlm.data import Ahead, Rows, ShuffledOrder
from xdlm.structs import Batch

#: Steps whose rows are read before they are needed.
_STEPS_AHEAD = 2


class _Part(NamedTuple):
    """A micro-batch on the host: tokens, where they are given, and the rows' classes."""

    tokens: Tensor
    given: Tensor | None
    label: Tensor | None


class StepBatches(Protocol):
    """Where a run gets its batches from."""

    def batches(self, step: int) -> Iterator[tuple[Batch, bool]]:
        """The micro-batches of a step, on the device, each with whether it is the last."""
        ...

    def n_learned(self, step: int) -> int:
        """Tokens of a step's whole batch that are learned."""
        ...

    def ahead(self, steps: range) -> AbstractContextManager[None]:
        """Within this, `batches` is asked for these steps, in order."""
        ...


class Loader:
    """This process's share of each global batch, cut into micro-batches. Which rows, and under which
    sample numbers, depends on the step alone, and not on whether they were read ahead."""

    def __init__(
        self,
        rows: Rows,
        *,
        seed: int,
        batch: int,
        share: slice,
        micro_batch: int,
        device: torch.device,
        labelled: bool = False,
        check: Callable[[Tensor], None] | None = None,
    ) -> None:
        """`labelled`: the model wants to know the rows' classes. `check` is shown all tokens, on the host,
        and raises where they cannot be learned from."""
        self.rows, self.order = rows, ShuffledOrder(len(rows), seed)
        self.batch, self.share, self.micro_batch, self.device = batch, share, micro_batch, device
        self.labelled, self._check = labelled, check
        self._read_ahead: Ahead[tuple[int, list[_Part]]] | None = None

    @contextmanager
    def ahead(self, steps: range) -> Iterator[None]:
        with Ahead(map(self._read, steps), _STEPS_AHEAD) as self._read_ahead:
            try:
                yield
            finally:
                self._read_ahead = None

    def batches(self, step: int) -> Iterator[tuple[Batch, bool]]:
        read, parts = self._read(step) if self._read_ahead is None else next(self._read_ahead)
        assert read == step, f"step {read} was read ahead, not {step}"
        first = step * self.batch + self.share.start
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            index = torch.arange(first, first + len(part.tokens))
            first += len(part.tokens)
            given, label = (None if v is None else self._moved(v) for v in (part.given, part.label))
            yield Batch(self._moved(part.tokens), index, label=label, given=given), left == 0

    def n_learned(self, step: int) -> int:
        """Tokens of a step's whole batch that are learned: what its loss is divided by."""
        return self.rows.n_learned(self.order.rows(step * self.batch, self.batch))

    def _moved(self, tensor: Tensor) -> Tensor:
        # Pinned, or the copy would wait for all that the GPU has to do. Here and not in the thread,
        # which must not call CUDA while a graph is being recorded.
        host = tensor.pin_memory() if self.device.type == "cuda" else tensor
        return host.to(self.device, non_blocking=True)

    def _read(self, step: int) -> tuple[int, list[_Part]]:
        picked = self.order.rows(step * self.batch, self.batch)[self.share]
        parts = []
        for start in range(0, len(picked), self.micro_batch):
            rows = picked[start : start + self.micro_batch]
            label = self.rows.labels(rows) if self.labelled else None
            tokens = torch.from_numpy(self.rows.take(rows))
            if self._check is not None:
                self._check(tokens)
            parts.append(_Part(tokens, _tensor(self.rows.given(rows)), _tensor(label)))
        return step, parts


def _tensor(array: NDArray[Any] | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


class Held:
    """The batches of one step again and again, for measuring what reading costs."""

    def __init__(self, loader: StepBatches, step: int) -> None:
        self._batches, self._n_learned = list(loader.batches(step)), loader.n_learned(step)

    def batches(self, step: int) -> Iterator[tuple[Batch, bool]]:
        return iter(self._batches)

    def n_learned(self, step: int) -> int:
        return self._n_learned

    def ahead(self, steps: range) -> AbstractContextManager[None]:
        return nullcontext()
