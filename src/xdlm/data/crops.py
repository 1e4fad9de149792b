"""Square views of images of any size, cut as ADM and LlamaGen cut them (Sun et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xdlm.errors import UserError


@dataclass(frozen=True)
class Views:
    """What is taken of an image: its middle and the mirror image of that ("centre"), or the four corners
    and the middle of a square that is `widen` times as large, and their mirror images ("ten")."""

    side: int
    crops: Literal["centre", "ten"] = "ten"
    widen: float = 1.1

    def __post_init__(self) -> None:
        if self.side < 1 or not 1 <= self.widen <= 4:
            raise UserError(
                f"views need a side >= 1 and a widening in 1..4, got {self.side}, {self.widen}"
            )

    @property
    def number(self) -> int:
        """Views of an image."""
        return 10 if self.crops == "ten" else 2

    def of(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """All views [number, side, side, 3] of an image [h, w, 3]."""
        if self.crops == "centre":
            middle = centre_crop(image, self.side)
            return np.stack([middle, middle[:, ::-1]])
        square = centre_crop(image, int(self.side * self.widen))
        return np.stack([*_five(square, self.side), *_five(square[:, ::-1], self.side)])


def centre_crop(image: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The middle square of an image whose shorter side is scaled to `side`: halved by averaging as long
    as it is twice as long or more, then to size by cubic curves."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("images need pillow; install xdlm[image]") from error
    scaled = Image.fromarray(image)
    while min(scaled.size) >= 2 * side:
        width, height = scaled.size
        scaled = scaled.resize((width // 2, height // 2), resample=Image.Resampling.BOX)
    factor = side / min(scaled.size)
    width, height = (round(size * factor) for size in scaled.size)
    pixels = np.asarray(scaled.resize((width, height), resample=Image.Resampling.BICUBIC))
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[top : top + side, left : left + side]


def _five(square: NDArray[np.uint8], side: int) -> list[NDArray[np.uint8]]:
    """Top left, top right, bottom left, bottom right, middle."""
    far = len(square) - side
    middle = round(far / 2)
    corners = ((0, 0), (0, far), (far, 0), (far, far), (middle, middle))
    return [square[top : top + side, left : left + side] for top, left in corners]
