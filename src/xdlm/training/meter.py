"""How fast a run goes, what share of it is waiting, and how much of the hardware it uses."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from xdlm.models import Denoiser

T = TypeVar("T")

#: Dense bfloat16 operations per second by what a GPU's name holds, from the vendors' data sheets; the first
#: that fits counts. A GPU that is not here has no figure, rather than a guessed one.
PEAK_BF16: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.4e12),
    ("H800", 989.4e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
)


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Of a whole GPU in bfloat16; None for one that the table does not know, or another precision."""
    if dtype != torch.bfloat16 or "MIG" in name:
        return None
    return next((peak for part, peak in PEAK_BF16 if re.search(rf"\b{part}\b", name)), None)


def peak_memory_gb(device: torch.device) -> float | None:
    """The most that this process has held so far, of the GPU's memory or else of the machine's; None
    where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 1e9
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Meter:
    """Counts between two lines of the log.

    `mfu` is model FLOP/s over what the GPUs could do: operations that the model needs for the tokens seen,
    the head's only for the rows that it was run on, with nothing added for what is computed twice. A model
    of frozen weights needs fewer, and has no figure.
    """

    def __init__(
        self,
        model: Denoiser,
        device: torch.device,
        dtype: torch.dtype,
        *,
        batch: int,
        length: int,
        processes: int = 1,
    ) -> None:
        """`batch` is that of all processes together."""
        self._model, self._device, self._processes = model, device, processes
        self._batch, self._length = batch, length
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        frozen = any(not p.requires_grad for p in model.parameters())
        self._peak = None if frozen else peak_flops(name, dtype)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Count anew from here: what came before is not of the next line."""
        self._first, self._began, self._waited = step, time.perf_counter(), 0.0
        self._tokens = self._head_rows = 0

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; the time until each is there is counted as waiting for data."""
        iterator = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._waited += time.perf_counter() - began
            yield item

    def count(self, *, tokens: int, head_rows: int) -> None:
        """What this process has put through the trunk and through the head."""
        self._tokens += tokens
        self._head_rows += head_rows

    def read(self, step: int) -> dict[str, float]:
        """The figures of a line."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        speed = (step - self._first) * self._batch * self._length / seconds
        figures = {
            "tokens_per_s": round(speed),
            "data_wait": round(min(self._waited / seconds, 1.0), 5),
        }
        head_share = self._head_rows / self._tokens if self._tokens else 1.0
        needed = self._model.flops_per_token(self._length, head_share)
        if self._peak is not None and needed is not None:
            figures["mfu"] = round(needed * speed / (self._peak * self._processes), 5)
        memory = peak_memory_gb(self._device)
        return figures if memory is None else figures | {"peak_gb": round(memory, 3)}
