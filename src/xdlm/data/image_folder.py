"""A folder of images that has a folder for each class, as ImageNet comes: its classes are these folders in
the order of their names. Or one that has images alone, which are of no class. Images are of any size, and
are decoded when they are asked for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xdlm.data.crops import centre_crop
from xdlm.data.packing import Tokens
from xdlm.data.pictures import Progress, decoded
from xdlm.errors import UserError

_SUFFIXES = {".jpeg", ".jpg", ".png", ".webp", ".bmp"}


@dataclass(frozen=True)
class ImageFolder:
    """Files by their places under `root`, class by class; `counts` says how many of each class. Without
    classes there are files alone."""

    root: Path
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    files: tuple[str, ...]

    @classmethod
    def open(
        cls, root: str | Path, *, limit: int | None = None, on_progress: Progress | None = None
    ) -> ImageFolder:
        """`limit` takes the first so many of each class, or of all where there are none."""
        root = Path(root)
        if limit is not None and limit < 1:
            raise UserError(f"a limit must be at least 1 image of each class, got {limit}")
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        if not folders:
            return cls(root, (), (), tuple(_images_in(root)[:limit]))
        if beside := [path.name for path in sorted(root.iterdir()) if _is_image(path)]:
            raise UserError(
                f"{root} has images beside its class folders, such as {beside[0]} ({len(beside)} in all): "
                "put each into the folder of its class, or elsewhere"
            )
        parts: list[list[str]] = []
        for i, folder in enumerate(folders):
            parts.append([f"{folder.name}/{name}" for name in _images_in(folder)[:limit]])
            if on_progress is not None:
                on_progress(i + 1, len(folders))
        return cls(
            root, tuple(folder.name for folder in folders), tuple(map(len, parts)),
            tuple(name for part in parts for name in part),
        )  # fmt: skip

    @property
    def labels(self) -> NDArray[np.int64] | None:
        return np.repeat(np.arange(len(self.counts)), self.counts) if self.classes else None

    @cached_property
    def digest(self) -> str:
        """Of the files' names and sizes: reading them all would take as long as using them."""
        listing = "".join(f"{name} {(self.root / name).stat().st_size}\n" for name in self.files)
        return hashlib.sha256(listing.encode()).hexdigest()

    def image(self, number: int) -> NDArray[np.uint8]:
        """[h, w, 3], in colour: a few of ImageNet's are not, and are used as if they were."""
        file = self.root / self.files[number]
        return decoded(file.read_bytes(), str(file), convert=True)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES and not path.is_dir()


def _images_in(folder: Path) -> list[str]:
    files = folder.iterdir() if folder.is_dir() else ()
    names = sorted(path.name for path in files if _is_image(path))
    if not names:
        raise UserError(f"{folder} holds no images ({', '.join(sorted(_SUFFIXES))})")
    return names


@dataclass(frozen=True)
class FolderPixels:
    """A `TokenStream` of the levels of all images, each cut to its middle square of `side` pixels."""

    folder: ImageFolder
    side: int

    @property
    def n_documents(self) -> int:
        return len(self.folder.files)

    @property
    def n_tokens(self) -> int:
        return self.n_documents * self._length

    @property
    def n_characters(self) -> int:
        return self.n_tokens

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.folder.digest} {self.side}".encode()).hexdigest()

    @property
    def _length(self) -> int:
        return 3 * self.side**2

    def read(self, start: int, stop: int) -> Tokens:
        first, last = start // self._length, -(-stop // self._length)
        images = [centre_crop(self.folder.image(i), self.side).ravel() for i in range(first, last)]
        levels = np.concatenate(images) if images else np.empty(0, dtype=np.uint8)
        return levels[start - first * self._length : stop - first * self._length]
