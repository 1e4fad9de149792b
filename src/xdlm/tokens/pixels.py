"""Images as tokens: every channel of every pixel is one of 256 levels, and a token is a level.

An image [side, side, 3] of bytes is read row by row, the three channels of a pixel side by side. Nothing is
rounded, so the way there and back is exact.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xdlm.errors import UserError

LEVELS, CHANNELS = 256, 3
#: What `data.tokenizer` calls it.
NAME = "pixels"
_MAX_SIDE = 1024


@dataclass(frozen=True)
class Pixels:
    """Square colour images of `side` x `side` pixels. The mask is not its concern: noise adds that."""

    side: int

    def __post_init__(self) -> None:
        if not 1 <= self.side <= _MAX_SIDE:
            raise UserError(f"images must have 1 to {_MAX_SIDE} pixels a side, got {self.side}")

    @classmethod
    def of_length(cls, length: int) -> Pixels:
        """The images that make so many tokens."""
        side = math.isqrt(length // CHANNELS)
        if CHANNELS * side**2 != length:
            raise UserError(
                f"data.length {length} is not that of a square colour image, 3 x side x side; "
                f"one of 32 x 32 pixels has {CHANNELS * 32**2}"
            )
        return cls(side)

    @classmethod
    def from_json(cls, text: str) -> Pixels:
        """What `to_json` gave."""
        tree = json.loads(text)
        if not is_pixels(tree) or not isinstance(tree.get("side"), int):
            raise UserError("not a description of pixels")
        return cls(tree["side"])

    def to_json(self) -> str:
        return json.dumps({"type": NAME, "side": self.side})

    @property
    def size(self) -> int:
        """Number of tokens, without the mask."""
        return LEVELS

    @property
    def length(self) -> int:
        """Tokens in an image."""
        return CHANNELS * self.side**2

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.side, self.side, CHANNELS

    def files(self) -> dict[str, str]:
        """All that a folder needs to hold this tokenizer, by name."""
        return {"tokenizer.json": self.to_json()}

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Images [n, side, side, 3] to tokens [n, length]."""
        if images.dtype != np.uint8 or images.shape[1:] != self.shape:
            raise UserError(
                f"expected colour images of {self.side} x {self.side} pixels in bytes, "
                f"got {images.dtype} of shape {images.shape[1:]}"
            )
        return images.reshape(len(images), self.length)

    def decode(self, tokens: NDArray[np.integer], *, blank: int = LEVELS // 2) -> NDArray[np.uint8]:
        """Tokens [n, length] to images [n, side, side, 3]; a mask shows as the level `blank`."""
        if tokens.shape[1:] != (self.length,):
            raise UserError(f"an image has {self.length} tokens, got shape {tokens.shape[1:]}")
        levels = np.where((tokens >= 0) & (tokens < LEVELS), tokens, blank)
        return levels.astype(np.uint8).reshape(len(tokens), *self.shape)

    def per_pixel(self, values: NDArray[Any]) -> NDArray[Any]:
        """What belongs to tokens [n, length], at their pixels and channels [n, side, side, 3]."""
        return values.reshape(-1, *self.shape)


def is_pixels(tree: Any) -> bool:
    """Whether a tokenizer's JSON describes pixels."""
    return isinstance(tree, dict) and tree.get("type") == NAME
