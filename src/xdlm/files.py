"""Writing files so that a crash, a full disk or a kill never leaves half of one behind."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xdlm.errors import UserError


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give a scratch folder to fill; on success it becomes `target`, on failure it disappears.

    Nothing that is already there is ever replaced.
    """
    target = target.absolute()
    check_free(target)
    scratch = scratch_of(target)
    with explained(target):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
            for path in (*scratch.rglob("*"), scratch):
                _sync(path)
            scratch.rename(target)  # replaces an empty folder, and nothing else
            _sync(target.parent)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def check_free(target: Path) -> None:
    """That a new folder may come to be there."""
    target = target.absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} already exists; choose another folder or remove it")


def scratch_of(target: Path) -> Path:
    """Where a folder or a file is put together before it is called `target`."""
    return target.with_name(f".{target.name}.partial")


def remove_folder(folder: Path) -> None:
    """Take a folder away at once, then delete it: a kill leaves a hidden rest, never half a folder."""
    doomed = folder.with_name(f".{folder.name}.removed")
    with explained(folder):
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def write_atomic(target: Path, content: str | bytes) -> None:
    """Replace a file's content all at once. A device or a pipe is written to as it is."""
    data = content.encode() if isinstance(content, str) else content
    if target.is_dir():
        raise UserError(f"cannot write {target}: it is a folder")
    with explained(target):
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        target = target.resolve()  # a link stays, what it points to is replaced
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = scratch_of(target)
        try:
            scratch.write_bytes(data)
            _sync(scratch)
            scratch.replace(target)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise


def check_writable(folder: Path, *, make: bool = True) -> None:
    """Fail now, not after hours of work, if nothing can be written to `folder`. One that is not there is
    made, or else, to leave nothing behind, the nearest one above it is tried."""
    with explained(folder):
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        _try_to_write(folder)


def check_file(file: Path) -> None:
    """The same for a file that is to be written; one that is there may be replaced."""
    if file.is_dir():
        raise UserError(f"cannot write {file}: it is a folder")
    if file.is_file() or not file.exists():  # a device or a pipe is written to as it is
        with explained(file):
            _try_to_write(file.parent)


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """Turn the operating system's refusal into a line that names the place."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(
            f"cannot write {target}: a part of its path is a file, not a folder"
        ) from error
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error


def _try_to_write(folder: Path) -> None:
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    probe = there / ".write-test"
    probe.write_bytes(b"")
    probe.unlink(missing_ok=True)  # another process may have tried the same


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
