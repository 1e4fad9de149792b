"""Whether weights are still those that they were, told from a small part of them.

Adapters are good for nothing but the weights that they were trained beside, and those they name by their
place. A hash of all of them would mean to read a large model twice whenever it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from xdlm.errors import UserError

#: Bytes that are read of a tensor: so many pieces, the first and the last of them at its ends.
_PIECES, _PIECE_BYTES = 8, 4096


def fingerprint(files: Sequence[Path]) -> str:
    """A hash of safetensors files: of their sizes, their headers (names, shapes and types) and 32 KB of
    every tensor, all of it where it has no more. Training, merging or casting changes most numbers of a
    tensor, and so what is read of it; a change of a few in a large one may go unseen. Where the files lie,
    and what they are called but for the order, plays no part."""
    digest = hashlib.sha256()
    for file in files:
        try:
            with file.open("rb") as stream:
                _add(stream, file.stat().st_size, digest)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise UserError(f"cannot read {file}: not a safetensors file ({error})") from error
    return digest.hexdigest()


def _add(stream: BinaryIO, size: int, digest: Any) -> None:
    (length,) = struct.unpack("<Q", stream.read(8))
    header = stream.read(min(length, size))
    digest.update(struct.pack("<QQ", size, length))
    digest.update(header)
    for begin, end in _spans(json.loads(header)):
        for place in _places(8 + length + begin, 8 + length + end):
            stream.seek(place.start)
            digest.update(stream.read(len(place)))


def _spans(header: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Where the tensors lie behind the header, in their order there: a disk likes it."""
    yield from sorted(
        (int(begin), int(end))
        for begin, end in (
            entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"
        )
    )


def _places(begin: int, end: int) -> list[range]:
    """The pieces to read of a tensor."""
    if end - begin <= _PIECES * _PIECE_BYTES:
        return [range(begin, end)]
    room = end - begin - _PIECE_BYTES
    starts = (begin + room * i // (_PIECES - 1) for i in range(_PIECES))
    return [range(start, start + _PIECE_BYTES) for start in starts]
