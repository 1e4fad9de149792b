"""Several processes that train one model, as `torchrun` starts them.

Each process takes its share of every batch; gradients are added up in float32 once per optimiser step.
Noise and times depend on the samples' numbers alone, so how a batch is shared changes nothing but the
order of a few additions. What a process holds of the model is decided in `engine`.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from xdlm.errors import UserError
from xdlm.files import explained, write_atomic

_NOTE, _LOCK = ".launch", ".lock"
T = TypeVar("T")


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

    def collect(self, found: dict[int, T]) -> dict[int, T]:
        """What all processes have found, by the number of the piece of work."""
        if self.size == 1:
            return found
        everyone: list[dict[int, T]] = [{}] * self.size
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


def started_again(out: Path) -> bool:
    """Whether the `torchrun` that started this process has begun the run in `out` before: a process that
    died is replaced and goes on, while a new launch over an old run is a new launch."""
    note = out / _NOTE
    return note.is_file() and launcher() in note.read_text(encoding="utf-8").splitlines()


def note_launch(out: Path, launchers: Iterable[str | None]) -> None:
    """Leave a note in `out` of who started the processes of a run, if `torchrun` did."""
    known = sorted({each for each in launchers if each is not None})
    if known:
        write_atomic(out / _NOTE, "\n".join(known))


def launcher() -> str | None:
    """The `torchrun` that started this process, which outlives it. The number of a run alone would not
    do: it may be the same for all of them, or be used again."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if run is None else f"{run} {socket.gethostname()} {os.getppid()}"


def refuse_second_run(out: Path) -> None:
    """Before a checkpoint is looked for that a run which is going on may delete meanwhile. Processes of one
    run that look at once do not disturb each other."""
    import fcntl

    if (out / _LOCK).is_file():
        with suppress(OSError), (out / _LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"another process is training in {out}") from error


@contextmanager
def only_run_in(out: Path) -> Iterator[None]:
    """Keep other runs out of a folder. The lock ends with the process, even by kill -9."""
    import fcntl  # where there is no such thing, the rest can still be used

    with explained(out):
        lock = (out / _LOCK).open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is training in {out}") from error
        except OSError as error:
            warnings.warn(
                f"{out} cannot be locked ({error.strerror}): let no other process train there",
                stacklevel=2,
            )
        yield


@contextmanager
def join_world() -> Iterator[World]:
    """Meet the other processes, if `torchrun` started several, and part from them at the end."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield World()
        return
    try:
        store, rank, size = next(dist.rendezvous("env://"))
    except (ValueError, dist.DistError) as error:
        raise UserError(
            f"WORLD_SIZE is set, but no other process answers ({error}); start several processes "
            "with torchrun, or unset it for one"
        ) from error
    # The place where they meet outlives them; addresses of processes that died must not be found there.
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # several nodes get a new store each time
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", store)
    # Flags and counts travel between CPUs, gradients between GPUs where there are any.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size)
    except RuntimeError as error:
        if not _is_about_the_network(error):
            raise
        reason = str(error).splitlines()[0].split(". ")[0]
        raise UserError(f"another process has ended, or does not answer: {reason}") from error
    finally:
        dist.destroy_process_group()


def _is_about_the_network(error: RuntimeError) -> bool:
    """NCCL and the store have types for it, gloo only its name."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)
