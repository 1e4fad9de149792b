"""CIFAR-10 as it is published: an archive of binary batches, or one of pickled ones.

A pickle is a program. Of the second archive only what describes an array of bytes is read: every name that
a pickle may call stands for a note of its arguments, and any other is refused.
"""

from __future__ import annotations

import pickle
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar

import numpy as np

from xdlm.data.pictures import Pictures, Progress, from_planes, join, read_binary
from xdlm.errors import UserError

SPLITS = ("train", "test")
#: Short names of the ten classes, by number.
CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
#: Batches of a split, by the beginnings of their names.
BATCHES = {"train": "data_batch_", "test": "test_batch"}
_PLANES = 3 * 32 * 32


def read_archive(file: Path, split: str, on_progress: Progress | None = None) -> Pictures:
    """The images of a split, batch by batch, out of either archive."""
    try:
        with tarfile.open(file) as archive:
            members = sorted(
                (m for m in archive.getmembers() if m.isfile() and _is_batch(m.name, split)),
                key=lambda member: member.name,
            )
            if not members:
                raise UserError(f"{file} holds no batches of CIFAR-10's {split} split")
            parts = []
            for i, member in enumerate(members):
                stream = archive.extractfile(member)
                assert stream is not None
                binary = member.name.endswith(".bin")
                parts.append(
                    (read_binary if binary else read_pickled)(stream, f"{file}, {member.name}")
                )
                if on_progress is not None:
                    on_progress(i + 1, len(members))
            return join(parts)
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise UserError(f"{file} is damaged or not an archive: {error}") from error


def _is_batch(name: str, split: str) -> bool:
    return PurePosixPath(name).name.startswith(BATCHES[split])


def read_pickled(stream: IO[bytes], name: str) -> Pictures:
    """A batch of the Python version: a dictionary with `data` [n, 3072] and `labels`."""
    try:
        batch = _Notes(stream, encoding="bytes").load()
        array, labels = batch[b"data"], batch[b"labels"]
        planes = array.bytes_of_rows(_PLANES)
        classes = np.asarray([int(label) for label in labels], dtype=np.int64)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except Exception as error:  # whatever a damaged program of a pickle makes its reader raise
        raise UserError(f"{name} is damaged or not CIFAR-10: {error!r}") from error
    if len(planes) != len(classes):
        raise UserError(f"{name} has {len(classes)} labels for {len(planes)} images")
    return Pictures(from_planes(planes), classes)


@dataclass
class _ArrayNote:
    """What a pickle says of an array."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def bytes_of_rows(self, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        _, shape, dtype, by_columns, content = self.state
        rows, columns = shape
        if dtype.code not in ("u1", b"u1") or by_columns or columns != width:
            raise UserError("not CIFAR-10: the images are not bytes, or have another size")
        return np.frombuffer(content, dtype=np.uint8).reshape(rows, columns)


@dataclass
class _DtypeNote:
    code: Any

    def __setstate__(self, state: Any) -> None:
        """The byte order, which bytes have none of."""


class _Notes(pickle.Unpickler):
    """Calls nothing but the two notes above."""

    _known: ClassVar[dict[str, Callable[..., Any]]] = {
        "_reconstruct": lambda *_: _ArrayNote(),
        "ndarray": _ArrayNote,
        "dtype": lambda code, *_: _DtypeNote(code),
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] != "numpy" or name not in self._known:
            raise UserError(f"a batch of CIFAR-10 does not need {module}.{name}: refused")
        return self._known[name]
