"""Images side by side in one picture."""

from __future__ import annotations

import io
import math

import numpy as np
from numpy.typing import NDArray

from xdlm.errors import UserError


def image_grid(
    images: NDArray[np.uint8], *, columns: int | None = None, gap: int = 1
) -> NDArray[np.uint8]:
    """Images [n, h, w, 3] row by row, with white lines of `gap` pixels between them; by default about as
    many rows as columns."""
    n, height, width, _ = images.shape
    columns = math.ceil(math.sqrt(n)) if columns is None else columns
    if n == 0 or columns < 1 or gap < 0:
        raise UserError("a grid needs images, at least one column, and no gap below 0")
    rows = -(-n // columns)
    page = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for i, image in enumerate(images):
        top, left = (i // columns) * (height + gap), (i % columns) * (width + gap)
        page[top : top + height, left : left + width] = image
    return page


def zoomed(image: NDArray[np.uint8], zoom: int) -> NDArray[np.uint8]:
    """Every pixel `zoom` x `zoom` large."""
    return image.repeat(zoom, axis=0).repeat(zoom, axis=1)


def png(image: NDArray[np.uint8]) -> bytes:
    """An image as a PNG file."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("pictures need pillow; install xdlm[image]") from error
    out = io.BytesIO()
    Image.fromarray(image).save(out, format="png", optimize=True)
    return out.getvalue()
