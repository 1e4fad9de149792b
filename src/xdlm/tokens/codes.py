"""Images as the codes of a VQ codec: far fewer tokens than pixels have, each of a cell of the image."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xdlm.errors import UserError
from xdlm.tokens.vq import DESCRIPTION, VqCodec, load_codec

#: How `data.tokenizer` begins that names a codec's folder.
PREFIX = "vq:"
_TYPE = "vq"
#: Images of 32 x 32 pixels that go through a codec together: about a CPU's cache, or enough for a GPU.
_BATCH, _GPU_BATCH = 64, 512


@dataclass(frozen=True)
class Codes:
    """Square colour images of `side` x `side` pixels in the codes of the codec in `folder`. A model keeps
    the codec's place and hash, not its weights. The mask is not its concern: noise adds that."""

    folder: str
    side: int
    sha256: str
    codec: VqCodec = field(compare=False, repr=False)

    @classmethod
    def open(cls, folder: str, length: int) -> Codes:
        """For images that make so many codes."""
        cells = math.isqrt(length)
        if cells**2 != length or cells == 0:
            raise UserError(
                f"data.length {length} is not that of a square of codes, such as 64 or 256"
            )
        codec = load_codec(Path(folder))
        return cls(folder, cells * codec.config.shrink, _stated_hash(folder), codec)

    @classmethod
    def of_side(cls, folder: str, side: int) -> Codes:
        """For images of so many pixels along a side."""
        codec = load_codec(Path(folder))
        if side < 1 or side % codec.config.shrink:
            raise UserError(
                f"{folder} takes images with a side that is a multiple of {codec.config.shrink}, not "
                f"{side}"
            )
        return cls(folder, side, _stated_hash(folder), codec)

    @classmethod
    def from_json(cls, text: str, near: Path | None = None) -> Codes:
        """What `to_json` gave; the codec must be the same, and where it was, or in a folder of that name
        beside the model, which lies `near`: or beside one of the folders that this is in."""
        tree = json.loads(text)
        if not {"folder", "length", "sha256"} <= tree.keys():
            raise UserError("not a description of codes")
        found = cls.open(_place(tree["folder"], tree["sha256"], near), tree["length"])
        if found.sha256 != tree["sha256"]:
            raise UserError(f"{found.folder} holds another codec than the model was trained with")
        return found

    def to_json(self) -> str:
        return json.dumps(
            {"type": _TYPE, "folder": self.folder, "length": self.length, "sha256": self.sha256}
        )

    def files(self) -> dict[str, str]:
        """All that a folder needs to hold this tokenizer, by name."""
        return {"tokenizer.json": self.to_json()}

    @property
    def size(self) -> int:
        """Number of tokens, without the mask."""
        return self.codec.config.codes

    @property
    def length(self) -> int:
        """Tokens in an image."""
        return self._cells**2

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.sha256} {self.side}".encode()).hexdigest()

    @property
    def _cells(self) -> int:
        return self.side // self.codec.config.shrink

    def to(self, device: torch.device) -> Codes:
        """The same, with the codec on a device."""
        self.codec.to(device)
        return self

    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """Images [n, side, side, 3] to tokens [n, length]."""
        if images.shape[1:] != (self.side, self.side, 3):
            raise UserError(
                f"expected colour images of {self.side} x {self.side} pixels, got {images.shape[1:]}"
            )
        # In one place from the start: small arrays that stay would pin the heap between large ones that go.
        tokens = np.empty((len(images), self.length), np.uint32)
        for part in self._parts(len(images)):
            tokens[part] = self.codec.encode(images[part])
        return tokens

    def decode(self, tokens: NDArray[np.integer], *, blank: int = 128) -> NDArray[np.uint8]:
        """Tokens [n, length] to images [n, side, side, 3]; a masked cell shows as the level `blank`."""
        masked = (tokens < 0) | (tokens >= self.size)
        codes = np.where(masked, 0, tokens)
        images = np.empty((len(codes), self.side, self.side, 3), np.uint8)
        for part in self._parts(len(codes)):
            images[part] = self.codec.decode(codes[part])
        images[self.per_pixel(masked)[..., 0]] = blank
        return images

    def _parts(self, n: int) -> list[slice]:
        most = _GPU_BATCH if self.codec.quant_conv.weight.is_cuda else _BATCH
        batch = max(1, most * 32**2 // self.side**2)
        return [slice(start, start + batch) for start in range(0, n, batch)]

    def per_pixel(self, values: NDArray[Any]) -> NDArray[Any]:
        """What belongs to tokens [n, length], at every pixel of their cells [n, side, side, 1]."""
        grid, shrink = values.reshape(-1, self._cells, self._cells, 1), self.codec.config.shrink
        return grid.repeat(shrink, axis=1).repeat(shrink, axis=2)


def _place(folder: str, sha256: str, near: Path | None) -> str:
    """Where the codec of that hash is, by where it was: models and codecs are moved together."""
    parents = [] if near is None else near.absolute().parents
    for place in (Path(folder), *(parent / Path(folder).name for parent in parents)):
        if (place / DESCRIPTION).is_file() and _stated_hash(str(place)) == sha256:
            return str(place)
    return folder


def is_codes(tree: Any) -> bool:
    """Whether a tokenizer's JSON describes codes."""
    return isinstance(tree, dict) and tree.get("type") == _TYPE


def _stated_hash(folder: str) -> str:
    """Of a codec's weights; reading them has checked it."""
    about = json.loads((Path(folder) / DESCRIPTION).read_text(encoding="utf-8"))
    return str(about["sha256"])
