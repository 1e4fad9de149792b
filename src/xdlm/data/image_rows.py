"""Images as rows of tokens with labels, from wherever they are.

A source is `cifar10:train` or `cifar10:test`, looked for under the folder of local data in any of the forms
that it is published in; a file: a grid (.webp, .png), a batch (.bin) or .parquet; a folder of images, with
a folder for each class or without classes; or a folder of codes that `xdlm prepare imagenet` made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xdlm.data import cifar
from xdlm.data.coded import is_coded, open_coded
from xdlm.data.documents import data_root
from xdlm.data.image_folder import FolderPixels, ImageFolder
from xdlm.data.packing import Rows, TokensInMemory
from xdlm.data.pictures import (
    N_CLASSES,
    Pictures,
    Progress,
    join,
    read_binary,
    read_grids,
    read_parquet,
)
from xdlm.data.shards import JOURNAL
from xdlm.errors import UserError, did_you_mean
from xdlm.tokens import ImageTokenizer, Pixels

CIFAR = "cifar10"
_GRIDS, _ARCHIVES = (".webp", ".png"), (".gz", ".tgz", ".tar")
#: Where CIFAR-10 is looked for under the folder of local data, and the files of a split there: the first
#: pattern that finds any counts.
_FOLDERS = ("cifar10", "images", "cifar-10-batches-bin", ".")
#: What the Python archive unpacks to, as torchvision leaves it: batches without a suffix.
_UNPACKED = "cifar-10-batches-py"
_PATTERNS = (
    "cifar10_{split}*.webp", "cifar10_{split}*.png", "{batch}*.bin", "{split}*.parquet",
    "*/{split}*.parquet", "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", f"{_UNPACKED}/{{batch}}*",
)  # fmt: skip


@dataclass(frozen=True)
class ImageRows(Rows):
    """Each image a row. `mirrored` adds every image's mirror image, as rows behind all others: an epoch
    then sees both once."""

    side: int = 0
    classes: NDArray[np.int64] | None = None
    mirrored: bool = False

    @property
    def n_images(self) -> int:
        return super().__len__()

    def __len__(self) -> int:
        return self.n_images * (2 if self.mirrored else 1)

    @property
    def n_classes(self) -> int:
        return 0 if self.classes is None else int(self.classes.max()) + 1

    @property
    def digest(self) -> str:
        labels = b"" if self.classes is None else self.classes.tobytes()
        what = f"{super().digest} {self.mirrored} ".encode() + labels
        return hashlib.sha256(what).hexdigest()

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        number = np.asarray(indices)
        rows = super().take(number % self.n_images)
        turned = number >= self.n_images
        images = rows[turned].reshape(-1, self.side, self.side, 3)
        rows[turned] = images[:, :, ::-1].reshape(len(images), self.length)
        return rows

    def labels(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64] | None:
        return None if self.classes is None else self.classes[np.asarray(indices) % self.n_images]


def load_images(
    source: str,
    tokenizer: ImageTokenizer,
    *,
    mirrored: bool = False,
    limit: int | None = None,
    root: str | Path | None = None,
    on_progress: Progress | None = None,
) -> ImageRows:
    """The images of a source as rows; `limit` takes the first so many, or of a folder with classes so many
    of each."""
    if limit is not None and limit < 1:
        raise UserError(f"a limit must be at least 1 image, got {limit}")
    if Path(source).is_dir():
        return _of_folder(source, tokenizer, mirrored, limit, on_progress)
    side = tokenizer.side
    found = read_pictures(source, side, root=root, on_progress=on_progress)
    images, labels = found.images[:limit], found.labels
    if images.shape[1:3] != (side, side):
        height, width = images.shape[1:3]
        raise UserError(
            f"{source} has images of {width} x {height} pixels, and data.length {tokenizer.length} is "
            f"for {side} x {side}"
        )
    labels = None if labels is None else labels[:limit]
    if mirrored and not isinstance(
        tokenizer, Pixels
    ):  # codes of a mirror image are codes of their own
        images, mirrored = np.concatenate([images, images[:, :, ::-1]]), False
        labels = None if labels is None else np.tile(labels, 2)
    tokens = tokenizer.encode(images)
    return ImageRows(
        TokensInMemory(tokens.reshape(-1), tokens.size, len(tokens)), tokenizer.length,
        side=side, classes=labels, mirrored=mirrored,
    )  # fmt: skip


def _of_folder(
    source: str,
    tokenizer: ImageTokenizer,
    mirrored: bool,
    limit: int | None,
    on_progress: Progress | None,
) -> ImageRows:
    """Codes that were prepared, or pixels that are decoded when they are asked for."""
    if (Path(source) / JOURNAL).is_file():
        raise UserError(f"{source} is unfinished; run `xdlm prepare imagenet` again to complete it")
    side, length = tokenizer.side, tokenizer.length
    if isinstance(tokenizer, Pixels):
        if is_coded(source):
            raise UserError(f"{source} holds codes, and pixels are wanted; give a folder of images")
        folder = ImageFolder.open(source, limit=limit, on_progress=on_progress)
        stream = FolderPixels(folder, side)
        return ImageRows(stream, length, side=side, classes=folder.labels, mirrored=mirrored)
    if not is_coded(source):
        raise UserError(
            f"{source} holds no codes; run `xdlm prepare imagenet --data {source} --codec "
            f"{tokenizer.folder} --out FOLDER` once and give its folder"
        )
    if mirrored or limit is not None:
        raise UserError(
            f"{source} holds mirror images already, class by class: remove data.flips and data.limit"
        )
    codes, labels = open_coded(source, tokenizer, on_check=on_progress)
    return ImageRows(codes, length, side=side, classes=labels)


def read_pictures(
    source: str,
    side: int,
    *,
    root: str | Path | None = None,
    on_progress: Progress | None = None,
) -> Pictures:
    """The images of a source with their labels. `side` is how a grid is cut."""
    name, _, split = source.partition(":")
    if name != CIFAR or not split:
        if not Path(source).is_file():
            raise UserError(
                f"no images at {source}: give a file (.webp, .png, .bin, .parquet), a folder of "
                f"images, or {CIFAR}:train or {CIFAR}:test"
            )
        return _read([Path(source)], None, side, on_progress)
    if split not in cifar.SPLITS:
        raise UserError(f"unknown split '{split}'{did_you_mean(split, cifar.SPLITS)}")
    found = _read(_find_cifar(split, Path(root or data_root())), split, side, on_progress)
    if found.labels is not None:
        outside = (found.labels < 0) | (found.labels >= N_CLASSES)
        if outside.any():
            first = int(outside.argmax())
            raise UserError(
                f"{source}: label {first} is {found.labels[first]}, outside 0..{N_CLASSES - 1}"
            )
    return found


def _find_cifar(split: str, root: Path) -> list[Path]:
    for folder in _FOLDERS:
        for pattern in _PATTERNS:
            named = pattern.format(split=split, batch=cifar.BATCHES[split])
            if files := sorted((root / folder).glob(named)):
                return files
    raise UserError(
        f"no CIFAR-10 under {root}/{CIFAR}: put its archive, its batches (.bin, or {_UNPACKED}), its "
        "parquet files or grids there, or name another folder of data in XDLM_DATA"
    )


def _read(
    files: list[Path], split: str | None, side: int, on_progress: Progress | None
) -> Pictures:
    kind = files[0].suffix
    if kind in _GRIDS:
        return read_grids(files, side, on_progress)
    if kind in _ARCHIVES:
        if split is None:
            raise UserError(
                f"{files[0]} holds both splits: put it into the folder of data and name {CIFAR}:train "
                f"or {CIFAR}:test"
            )
        return cifar.read_archive(files[0], split, on_progress)
    readers: dict[str, Callable[[Path], Pictures]] = {
        ".bin": _read_bin,
        ".parquet": partial(read_parquet, on_progress=on_progress),
    }
    if split is not None:  # a file that is named must say what it is
        readers[""] = _read_pickled
    if kind not in readers:
        known = (*_GRIDS, *filter(None, readers))
        raise UserError(f"{files[0]}: images come as {', '.join(known)}, not '{kind}'")
    return join([readers[kind](file) for file in files])


def _read_pickled(file: Path) -> Pictures:
    with file.open("rb") as stream:
        return cifar.read_pickled(stream, str(file))


def _read_bin(file: Path) -> Pictures:
    with file.open("rb") as stream:
        return read_binary(stream, str(file))
