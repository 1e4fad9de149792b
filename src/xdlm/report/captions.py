"""Words around pictures: whose each one is, what a column is, what colours mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from xdlm.errors import UserError

_SIZE, _PAD, _GAP = 13, 6, 6
_INK = "#202020"


def captioned(
    blocks: Sequence[NDArray[np.uint8]],
    names: Sequence[str],
    *,
    title: str = "",
    heads: Sequence[str] = (),
    legend: Mapping[str, str] | None = None,
) -> NDArray[np.uint8]:
    """Blocks [h, w, 3] of one width, one below the other, with a name to the left of each. Above them are
    the `heads` of columns of equal width, after a `title` that says what they are; below them is what
    colours (#rrggbb) mean."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise UserError("pictures need pillow; install xdlm[image]") from error
    font = ImageFont.load_default(_SIZE)
    margin = 2 * _PAD + round(max(font.getlength(text) for text in (*names, title)))
    line = _SIZE + 2 * _PAD
    top, width = line if heads else 0, blocks[0].shape[1]
    height = sum(len(block) + _GAP for block in blocks) - _GAP
    words = [round(font.getlength(meaning)) + 10 + 3 * _PAD for meaning in legend or ()]
    across = max(margin + width, _PAD + sum(words))
    page = Image.new("RGB", (across, top + height + (line if legend else 0)), "white")
    draw = ImageDraw.Draw(page)

    def write(x: float, y: float, text: str, anchor: str) -> None:
        draw.text((x, y), text, fill=_INK, font=font, anchor=anchor)

    for i, head in enumerate((title, *heads) if heads else ()):
        place = margin + (i - 0.5) * width / len(heads) if i else margin - _PAD
        write(place, top / 2, head, "mm" if i else "rm")
    for block, name in zip(blocks, names, strict=True):
        write(margin - _PAD, top + len(block) / 2, name, "rm")
        page.paste(Image.fromarray(block), (margin, top))
        top += len(block) + _GAP
    left, middle = across - sum(words), top - _GAP + line / 2
    for (meaning, colour), word in zip((legend or {}).items(), words, strict=True):
        draw.rectangle((left, middle - 5, left + 10, middle + 5), fill=colour)
        write(left + 10 + _PAD, middle, meaning, "lm")
        left += word
    return np.asarray(page)
