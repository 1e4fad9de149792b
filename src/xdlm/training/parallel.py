"""Several processes that train one model, as `torchrun` starts them.

Each process takes its share of every batch; gradients are added up in float32 once per optimiser step.
Noise and times depend on the samples' numbers alone, so how a batch is shared changes nothing but the
order of a few additions. What a process holds of the model is decided in `engine`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from xdlm.errors import UserError
from xdlm.files import write_atomic

_NOTE, _NO_LAUNCH = ".launch", "none"


@dataclass(frozen=True)
class World:
    """The processes of a run and which of them this is. Of one process, everything here is free."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes the log and the checkpoints."""
        return self.rank == 0

    def share(self, n: int) -> slice:
        """This process's part of `n` things."""
        if n % self.size:
            raise UserError(f"train.batch {n} cannot be shared by {self.size} processes evenly")
        each = n // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def deal(self, n: int) -> list[int]:
        """Which of `n` pieces of work are this process's. All get equally many, since they may have to
        meet at each: where that does not come out even, the last piece is done more than once."""
        return [min(i + self.rank, n - 1) for i in range(0, n, self.size)]

    def collect(self, found: dict[int, Tensor]) -> dict[int, Tensor]:
        """What all processes have found, by the number of the piece of work."""
        if self.size == 1:
            return found
        everyone: list[dict[int, Tensor]] = [{}] * self.size
        dist.all_gather_object(everyone, found)
        return {number: value for each in everyone for number, value in each.items()}

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return self.highest(int(flag)) > 0

    def highest(self, number: int) -> int:
        """The largest of all processes' numbers."""
        if self.size == 1:
            return number
        vote = torch.tensor(number)
        dist.all_reduce(vote, dist.ReduceOp.MAX)
        return int(vote)

    def check_agreement(self, **what: object) -> None:
        """That all processes are about to do the same."""
        if self.size == 1:
            return
        everyone: list[dict[str, object] | None] = [None] * self.size
        dist.all_gather_object(everyone, what)
        for rank, other in enumerate(everyone):
            for name, value in (everyone[0] or {}).items():
                if other is None or other[name] != value:
                    raise UserError(
                        f"processes 0 and {rank} differ in {name}: do they see the same files?"
                    )

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()


def local_device() -> str | None:
    """The GPU that `torchrun` means this process to use, if there are several processes and GPUs."""
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    return None


def started_again(out: Path) -> bool:
    """Whether this launch of `torchrun` has begun the run in `out` before: a process that died is
    replaced and goes on, while a new launch over an old run is a new launch."""
    note = out / _NOTE
    return note.is_file() and note.read_text(encoding="utf-8") == _launch() != _NO_LAUNCH


def note_launch(out: Path) -> None:
    """Leave a note in `out` of the launch that a run belongs to."""
    if _launch() != _NO_LAUNCH:
        write_atomic(out / _NOTE, _launch())


def _launch() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", _NO_LAUNCH)


@contextmanager
def join_world() -> Iterator[World]:
    """Meet the other processes, if `torchrun` started several, and part from them at the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield World()
        return
    # The place where they meet outlives them; addresses of processes that died must not be found there.
    store, rank, size = next(dist.rendezvous("env://"))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # several nodes get a new store each time
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", store)
    # Flags and counts travel between CPUs, gradients between GPUs where there are any.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size)
    finally:
        dist.destroy_process_group()
