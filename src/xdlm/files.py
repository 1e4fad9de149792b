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
    """Give a scratch folder to fill; on success it becomes `target`, on failure it disappears."""
    scratch = target.with_name(f".{target.name}.partial")
    with _explained(target):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
            for file in scratch.iterdir():
                _sync(file)
            if target.exists():
                old = target.with_name(f".{target.name}.replaced")
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
                scratch.rename(target)
                shutil.rmtree(old, ignore_errors=True)
            else:
                scratch.rename(target)
            _sync(target.parent)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def write_atomic(target: Path, content: str | bytes) -> None:
    """Replace a file's content all at once."""
    scratch = target.with_name(f".{target.name}.partial")
    with _explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            scratch.write_bytes(content.encode() if isinstance(content, str) else content)
            _sync(scratch)
            scratch.replace(target)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise


def check_writable(folder: Path) -> None:
    """Fail now, not after hours of work, if nothing can be written to `folder`."""
    probe = folder / ".write-test"
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    """Turn the operating system's refusal into a line that names the place."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
