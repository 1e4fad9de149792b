"""Checkpoints written beside the training: the state is copied to host memory, a thread does the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from xdlm.errors import UserError
from xdlm.files import atomic_folder, explained, scratch_of
from xdlm.training.checkpoint import (
    Content,
    checkpoint_folder,
    describe_files,
    drop_old_checkpoints,
    save_checkpoint,
    seal,
    shard_folder,
)
from xdlm.training.parallel import World

T = TypeVar("T")


class Saver:
    """Writes the checkpoints of a run, one at a time, and drops those that it need not keep.

    A checkpoint has its name only when it is whole; a kill before that leaves the ones before it. Whole
    tensors are written by the first process; where they are sharded every process writes its own part.
    """

    def __init__(self, out: Path, world: World, *, sharded: bool) -> None:
        self.out, self._world = out, world
        # The thread talks to those of the other processes while the training does, so it needs a line
        # of its own.
        self._line = dist.new_group(backend="gloo") if sharded else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        """What is being written is finished, whatever ended the run."""
        self.failure(wait=True)

    def save(self, content: Content) -> None:
        """Begin to write a checkpoint, after the one before it is done."""
        failure = self.failure(wait=True)
        assert failure is None, "a checkpoint was not written, and nobody asked"
        if self._line is None and not self._world.is_main:
            return
        tensors = {name: _copied(part) for name, part in content.tensors.items()}
        self._pending = self._thread.submit(self._write, replace(content, tensors=tensors))

    def failure(self, *, wait: bool = False) -> BaseException | None:
        """What went wrong with the checkpoint that was begun last: so far, or when it is done."""
        if self._pending is None or not (wait or self._pending.done()):
            return None
        return self._pending.exception()

    def _write(self, content: Content) -> None:
        folder = checkpoint_folder(self.out, content.step)
        if self._line is None:
            save_checkpoint(folder, content)
        else:
            _save_sharded(folder, content, self._world, self._line)
        if self._world.is_main:
            config = content.config.train
            drop_old_checkpoints(self.out, keep=config.keep, keep_every=config.keep_every)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}


def _save_sharded(folder: Path, content: Content, world: World, line: dist.ProcessGroup) -> None:
    """Every process writes and hashes its part; the first one makes the folder, says what is in it (lists
    of a folder on a network may differ for a while) and names it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    folder = folder.absolute()
    scratch = scratch_of(folder)
    with ExitStack() as stack:
        whole = atomic_folder(folder) if world.is_main else explained(folder)
        _together(line, lambda: stack.enter_context(whole))
        for name, tensors in content.tensors.items():
            writer = dcp.HuggingFaceStorageWriter(
                str(shard_folder(scratch, name)), save_distributed=True
            )
            try:
                dcp.save(dict(tensors), storage_writer=writer, process_group=line)
            except CheckpointException as error:
                raise UserError(f"cannot write {folder}: {_first_cause(error)}") from error
        parts = [shard_folder(scratch, name) for name in content.tensors]
        files = _together(line, lambda: _files_in(parts) if world.is_main else [])[0]
        own = files[world.rank :: world.size]
        described = _together(line, lambda: describe_files(scratch, own))
        if world.is_main:
            merged = {file: entry for part in described for file, entry in part.items()}
            seal(scratch, content, dict(sorted(merged.items())))


def _files_in(folders: list[Path]) -> list[Path]:
    return sorted(file for folder in folders for file in folder.iterdir())


def _together(line: dist.ProcessGroup, work: Callable[[], T]) -> list[T]:
    """What `work` gives on each process. Where it fails on one it fails on all: nobody goes on to wait for
    a process that has given up."""
    found, failure = None, None
    try:
        found = work()
    except Exception as error:
        failure = error
    everyone: list[Any] = [None] * line.size()
    dist.all_gather_object(everyone, (found, failure is None), line)
    if failure is not None:
        raise failure
    if not all(fine for _, fine in everyone):
        raise UserError("another process could not write its part of a checkpoint")
    return [each for each, _ in everyone]


def _first_cause(error: Any) -> str:
    cause, _ = next(iter(error.failures.values()))
    return str(getattr(cause, "strerror", None) or cause)
