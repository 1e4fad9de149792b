"""Images encoded once: a folder of shards of codes with a manifest, class by class, so that the manifest's
counts say the label of every row.

codes.json        format, classes and their numbers of images, views, hashes of files, codec and shards
codes-00000.bin   codes, little-endian, row by row; then codes-00001.bin, ...
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xdlm.data.crops import Views
from xdlm.data.image_folder import ImageFolder
from xdlm.data.journal import check_finished, journal_of, nothing_for_nothing, write_journal
from xdlm.data.packing import token_dtype
from xdlm.data.pictures import Progress
from xdlm.data.shards import JOURNAL, MappedTokens, Shard
from xdlm.errors import UserError
from xdlm.files import write_atomic
from xdlm.tokens import Codes

CODED = "codes.json"
_FORMAT = 1
#: Images in a shard: what an interruption costs at most.
SHARD_IMAGES = 8192
#: Images whose views are encoded together.
_GROUP = 32


@dataclass(frozen=True)
class CodedManifest:
    """What a folder of codes holds and how it came to be."""

    format: int
    source: str
    classes: list[str]
    counts: list[int]
    files_sha256: str
    views: dict[str, Any]
    views_per_image: int
    shard_images: int
    length: int
    codec_sha256: str
    codes: int
    dtype: str
    shards: list[Shard]

    @property
    def labels(self) -> NDArray[np.int64]:
        """Of all rows."""
        rows = [count * self.views_per_image for count in self.counts]
        return np.repeat(np.arange(len(rows)), rows)


def is_coded(folder: str | Path) -> bool:
    return (Path(folder) / CODED).is_file()


def read_coded(folder: Path) -> CodedManifest:
    file = folder / CODED
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        shards = [Shard(**shard) for shard in tree.pop("shards")]
        made = CodedManifest(**tree, shards=shards)
        rows = sum(made.counts) * made.views_per_image
        agrees = (
            len(made.classes) == len(made.counts)
            and made.dtype in ("uint16", "uint32")
            and sum(shard.tokens for shard in shards) == rows * made.length
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {error}") from error
    if made.format != _FORMAT:
        raise UserError(f"{file} has format {made.format}; this version reads {_FORMAT}")
    if not agrees:
        raise UserError(
            f"{file} is damaged: its counts do not agree; delete the folder and prepare it again"
        )
    return made


def open_coded(
    folder: str | Path, codes: Codes, *, on_check: Progress | None = None
) -> tuple[MappedTokens, NDArray[np.int64]]:
    """The codes of a folder, mapped into memory, and the labels of its rows; refuses those of another
    codec."""
    made = read_coded(Path(folder))
    if (made.codec_sha256, made.length) != (codes.sha256, codes.length):
        raise UserError(
            f"{folder} was prepared with another codec, or for {made.length} codes to an image: this "
            f"one is {codes.folder}, with {codes.length}"
        )
    return MappedTokens(Path(folder), made.shards, made.dtype, on_check=on_check), made.labels


def prepare_codes(
    folder: ImageFolder,
    codes: Codes,
    out: str | Path,
    *,
    views: Views,
    workers: int = 1,
    on_progress: Progress | None = None,
) -> CodedManifest:
    """Encode all views of all images; `on_progress` is told images done and their number, first of all
    those that an earlier run has left. What the folder holds already decides what is done, as for text."""
    out = Path(out)
    if views.side != codes.side:
        raise UserError(f"the views have a side of {views.side} and the codes one of {codes.side}")
    if workers < 1:
        raise UserError(f"at least one worker is needed, got {workers}")
    if not folder.classes:
        raise UserError(f"{folder.root} holds no folders of images, one for each class")
    inputs = _inputs(folder, codes, views)
    if is_coded(out):
        done = read_coded(out)
        check_finished(done, inputs, out)
        return done
    shards = journal_of(out, inputs)
    write_journal(out, inputs, shards)
    n_images, n_done = len(folder.files), sum(shard.documents for shard in shards) // views.number
    with ThreadPoolExecutor(workers) as pool, nothing_for_nothing(out, shards):
        for start in range(n_done, n_images, SHARD_IMAGES):
            seen = _views_of(pool, folder, views, range(start, min(start + SHARD_IMAGES, n_images)))
            parts: list[NDArray[np.uint32]] = []
            while group := list(islice(seen, _GROUP)):
                if on_progress is not None:
                    on_progress(start + sum(map(len, parts)) // views.number, n_images)
                parts.append(codes.encode(np.concatenate(group)))
            shards.append(_write_shard(out, len(shards), np.concatenate(parts), inputs["dtype"]))
            write_journal(out, inputs, shards)
    made = CodedManifest(source=str(folder.root), **inputs, shards=shards)
    write_atomic(out / CODED, json.dumps(asdict(made), indent=2) + "\n")
    (out / JOURNAL).unlink(missing_ok=True)
    return made


def _inputs(folder: ImageFolder, codes: Codes, views: Views) -> dict[str, Any]:
    """All that decides the result, as the manifest holds it."""
    return {
        "format": _FORMAT, "classes": list(folder.classes), "counts": list(folder.counts),
        "files_sha256": folder.digest, "views": asdict(views), "views_per_image": views.number,
        "shard_images": SHARD_IMAGES, "length": codes.length, "codec_sha256": codes.sha256,
        "codes": codes.size, "dtype": np.dtype(token_dtype(codes.size)).name,
    }  # fmt: skip


def _views_of(
    pool: ThreadPoolExecutor, folder: ImageFolder, views: Views, numbers: range
) -> Iterator[NDArray[np.uint8]]:
    """The views of one image after the other, some images being read ahead."""

    def read(number: int) -> NDArray[np.uint8]:
        return views.of(folder.image(number))

    left = iter(numbers)
    waiting = deque(pool.submit(read, number) for number in islice(left, 2 * _GROUP))
    while waiting:
        done = waiting.popleft().result()
        waiting.extend(pool.submit(read, number) for number in islice(left, 1))
        yield done


def _write_shard(out: Path, number: int, codes: NDArray[np.uint32], dtype: str) -> Shard:
    content = codes.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    name = f"codes-{number:05d}.bin"
    write_atomic(out / name, content)
    digest = hashlib.sha256(content).hexdigest()
    return Shard(name, len(content), digest, codes.size, len(codes), codes.size)
