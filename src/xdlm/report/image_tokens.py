"""What is needed to draw the tokens of an image: where they stand, and which colour each one has.

A position is (row, column, channel) of a grid, counted row by row with the channels of a cell side by side.
Models of pixels have a token for each channel of each pixel, those of codes one for a cell of many pixels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xdlm.report.colours import MASK
from xdlm.tokens import Codes, ImageTokenizer, Pixels

#: Cells of a side when a code is drawn alone, and codes that are drawn together.
_CELLS, _BATCH = 2, 64
#: Pixels that a cell may have on a side.
_MAX_CELL = 256


class Decoder(Protocol):
    """Whatever makes images of tokens: a tokenizer, or a palette."""

    def decode(self, tokens: NDArray[np.integer], *, blank: int = ...) -> NDArray[np.uint8]: ...

    def per_pixel(self, values: NDArray[Any]) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Layout:
    """A square image of `side` x `side` pixels, as `cells` x `cells` cells of `channels` tokens each."""

    side: int
    cells: int
    channels: int

    def __post_init__(self) -> None:
        counts = (self.side, self.cells, self.channels)
        if not all(type(n) is int and n > 0 for n in counts) or self.channels not in (1, 3):
            raise ValueError(f"an image of {counts}")
        if self.side % self.cells or self.side // self.cells > _MAX_CELL:
            raise ValueError(f"{self.cells} cells over {self.side} pixels")

    @classmethod
    def of(cls, tokenizer: ImageTokenizer) -> Layout:
        channels = 3 if isinstance(tokenizer, Pixels) else 1
        cells = tokenizer.side if channels == 3 else round(tokenizer.length**0.5)
        return cls(tokenizer.side, cells, channels)

    @property
    def length(self) -> int:
        return self.cells**2 * self.channels


@dataclass(frozen=True)
class Palette:
    """Images of tokens that have a colour each, #rrggbb: a cell has the colour of its token; of three
    channels each has its part of it."""

    layout: Layout
    colours: Mapping[int, str]
    masks: Sequence[int]

    def __post_init__(self) -> None:
        for colour in self.colours.values():
            if not re.fullmatch("#[0-9a-f]{6}", colour):
                raise ValueError(f"{colour!r} is no colour such as #4169e1")

    def decode(self, tokens: NDArray[np.integer], *, blank: int = 128) -> NDArray[np.uint8]:
        """Tokens [n, length] to images [n, side, side, 3]; a mask shows as the level `blank`."""
        known = np.array(sorted(self.colours))
        table = np.array([list(bytes.fromhex(self.colours[i][1:])) for i in known], dtype=np.uint8)
        table[np.isin(known, self.masks)] = blank
        number = self.per_pixel(np.searchsorted(known, tokens))
        if self.layout.channels == 1:
            return table[number[..., 0]]
        return np.stack([table[number[..., c], c] for c in range(3)], axis=-1)

    def per_pixel(self, values: NDArray[Any]) -> NDArray[Any]:
        """What belongs to tokens [n, length], at their pixels and channels [n, side, side, channels]."""
        cells, each = self.layout.cells, self.layout.side // self.layout.cells
        grid = values.reshape(-1, cells, cells, self.layout.channels)
        return grid.repeat(each, axis=1).repeat(each, axis=2)


def colours_of(tokenizer: ImageTokenizer, ids: Sequence[int]) -> dict[int, str]:
    """A colour for each token: the grey of a level, and for a code what it looks like among its own kind;
    that of the mask for what is neither."""
    known = np.array([i for i in ids if 0 <= i < tokenizer.size], dtype=np.int64)
    levels = known[:, None].repeat(3, axis=1)  # of a level the same for all three channels
    if isinstance(tokenizer, Codes):
        levels = _means(tokenizer, known)
    found = {
        int(i): f"#{bytes(level.tolist()).hex()}" for i, level in zip(known, levels, strict=True)
    }
    return {i: found.get(i, MASK.colour.lower()) for i in ids}


def _means(tokenizer: Codes, codes: NDArray[np.int64]) -> NDArray[np.int64]:
    parts = []
    for start in range(0, len(codes), _BATCH):
        alone = codes[start : start + _BATCH, None].repeat(_CELLS**2, axis=1)
        parts.append(tokenizer.codec.decode(alone).mean(axis=(1, 2)))
    return np.concatenate([*parts, np.empty((0, 3))]).round().astype(np.int64)
