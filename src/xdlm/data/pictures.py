"""Images out of files: grids, CIFAR-10's own archives (both kinds) and parquet.

.webp .png   a grid of images, row by row; labels in NAME_labels.json, where NAME is the file's name with
             or without a number at its end, one list for all files that share it, in their order
.bin         CIFAR-10's binary version: records of a label and three planes of 32 x 32 bytes
.parquet     records with an encoded image (`img` or `image`) and a `label`
.tar.gz      CIFAR-10's archive, of the binary or of the Python version, or what it unpacks to
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from xdlm.errors import UserError

#: Of CIFAR-10.
N_CLASSES = 10
_CIFAR_SIDE = 32
_PLANES = 3 * _CIFAR_SIDE**2
#: Columns of a parquet file.
_IMAGE_COLUMNS, _LABEL_COLUMN = ("img", "image"), "label"
#: Records of a parquet file that are decoded at a time.
_ROWS = 512


@dataclass(frozen=True)
class Pictures:
    """Images [n, side, side, 3] and their classes [n], if they have any."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.images)


Progress = Callable[[int, int], None]


def read_grids(files: Sequence[Path], side: int, on_progress: Progress | None = None) -> Pictures:
    """All images of some grids, with the labels beside them."""
    parts = []
    for i, file in enumerate(files):
        parts.append(_cut(decoded(file.read_bytes(), str(file)), side, str(file)))
        if on_progress is not None:
            on_progress(i + 1, len(files))
    images = np.concatenate(parts)
    label_files = {_labels_of(file) for file in files}
    there = [file for file in label_files if file.is_file()]
    if not there:
        return Pictures(images, None)
    if len(label_files) > 1:
        raise UserError(f"{files[0].parent}: grids of several sets; read one set at a time")
    return Pictures(images, _read_labels(there[0], len(images)))


def read_binary(stream: IO[bytes], name: str) -> Pictures:
    """A file of CIFAR-10's binary version."""
    content = np.frombuffer(stream.read(), dtype=np.uint8)
    if content.size == 0 or content.size % (1 + _PLANES):
        raise UserError(
            f"{name} is truncated or not CIFAR-10: {content.size} bytes are not records of "
            f"{1 + _PLANES}"
        )
    records = content.reshape(-1, 1 + _PLANES)
    worst = int(records[:, 0].argmax())
    if records[worst, 0] >= N_CLASSES:
        raise UserError(f"{name}: label {worst} is {records[worst, 0]}, outside 0..{N_CLASSES - 1}")
    return Pictures(from_planes(records[:, 1:]), records[:, 0].astype(np.int64))


def read_parquet(file: Path, on_progress: Progress | None = None) -> Pictures:
    """Encoded images of one size, with their labels."""
    parts: list[NDArray[np.uint8]] = []
    labels: list[Any] = []
    for number, total, record in _parquet_records(file):
        where = f"{file}, record {number}"
        cell = next((record[name] for name in _IMAGE_COLUMNS if name in record), None)
        encoded = cell.get("bytes") if isinstance(cell, dict) else cell
        if not isinstance(encoded, bytes):
            raise UserError(f"{where}: expected an encoded image in the column 'img' or 'image'")
        image = decoded(encoded, where)
        if parts and image.shape != parts[0].shape:
            raise UserError(
                f"{where}: {_size(image)} pixels, where those before have {_size(parts[0])}"
            )
        parts.append(image)
        labels.append(record.get(_LABEL_COLUMN))
        if on_progress is not None and (number % _ROWS == 0 or number == total):
            on_progress(number, total)
    if not parts:
        raise UserError(f"{file} holds no images")
    found = None if all(label is None for label in labels) else _checked(labels, str(file))
    return Pictures(np.stack(parts), found)


def join(parts: Sequence[Pictures]) -> Pictures:
    """Several sets, one behind the other; labelled if all of them are."""
    labels = [part.labels for part in parts if part.labels is not None]
    for part in parts:
        if part.images.shape[1:] != parts[0].images.shape[1:]:
            sizes = " and ".join(_size(p.images[0]) for p in (parts[0], part))
            raise UserError(f"the files of a set must hold images of one size, not {sizes}")
    return Pictures(
        np.concatenate([part.images for part in parts]),
        np.concatenate(labels) if len(labels) == len(parts) else None,
    )


def from_planes(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """CIFAR-10's order, all red, all green, all blue [n, 3072], to images [n, 32, 32, 3]."""
    images = planes.reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images)


def decoded(content: bytes, name: str, *, convert: bool = False) -> NDArray[np.uint8]:
    """The pixels of an encoded colour image; with `convert`, of any other as one."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise UserError(f"{name}: images need pillow; install xdlm[image]") from error
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            if convert:
                return np.asarray(image.convert("RGB"))
            if image.mode != "RGB":
                what = "a grey-scale image" if image.mode in ("1", "L", "LA") else "an image"
                raise UserError(
                    f"{name} is {what} of mode {image.mode}; convert it to colour (RGB) first"
                )
            return np.asarray(image)
    except UnidentifiedImageError as error:  # its own words name an object of Python
        raise UserError(f"{name} is damaged or not an image: of no known format") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{name} is damaged or not an image: {reason}") from error


def _cut(grid: NDArray[np.uint8], side: int, name: str) -> NDArray[np.uint8]:
    height, width, _ = grid.shape
    if height % side or width % side:
        raise UserError(
            f"{name} has {_size(grid)} pixels, not a grid of images of {side} x {side}; "
            "give their size in data.length, 3 x side x side"
        )
    cells = grid.reshape(height // side, side, width // side, side, 3).swapaxes(1, 2)
    return cells.reshape(-1, side, side, 3)


def _labels_of(grid: Path) -> Path:
    """`cifar10_train_3.webp` has its labels in `cifar10_train_labels.json`."""
    return grid.with_name(re.sub(r"_\d+$", "", grid.stem) + "_labels.json")


def _read_labels(file: Path, n_images: int) -> NDArray[np.int64]:
    try:
        labels = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{file} is not a list of labels: {error}") from error
    if not isinstance(labels, list):
        raise UserError(f"{file} is not a list of labels")
    if len(labels) != n_images:
        raise UserError(
            f"{file} has {len(labels)} labels for {n_images} images; they belong to all grids of "
            "the set together"
        )
    return _checked(labels, str(file))


def _checked(labels: Sequence[Any], name: str) -> NDArray[np.int64]:
    for number, label in enumerate(labels):
        if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < 2**31:
            raise UserError(f"{name}: label {number} is {label!r}, not a class number from 0 on")
    return np.asarray(labels, dtype=np.int64)


def _size(image: NDArray[np.uint8]) -> str:
    height, width = image.shape[:2]
    return f"{width} x {height}"


def _parquet_records(file: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Number, how many there are, and the columns that matter."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{file}: parquet files need pyarrow; install xdlm[hub]") from error
    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            total = opened.metadata.num_rows
            wanted = [
                name for name in opened.schema_arrow.names
                if name in (*_IMAGE_COLUMNS, _LABEL_COLUMN)
            ]  # fmt: skip
            for batch in opened.iter_batches(_ROWS, columns=wanted):
                for record in batch.to_pylist():
                    number += 1
                    yield number, total, record
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file} is damaged or not parquet: {reason}") from error
