"""A sampling run as a picture: a few of its frames (SVG), or all of them one after the other (GIF)."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

from xdlm.errors import UserError
from xdlm.report.colours import LOOKS, MASK
from xdlm.report.pieces import visible
from xdlm.report.recording import Speller
from xdlm.report.terminal import MASK_BLOCK, changes_into
from xdlm.sampling import Change, Trajectory

if TYPE_CHECKING:
    from PIL.Image import Image

#: Black on white, as on paper; the kinds of change have colours of their own.
_PAPER = TerminalTheme((255, 255, 255), (32, 32, 32), [(0, 0, 0)] * 8)
#: rich's own template fetches a font from the web; this one takes what the reader has.
_SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
<rect width="{width}" height="{height}" fill="#ffffff" />
<g clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""

_WIDTH, _MARGIN, _SIZE, _LINE = 760, 20, 18, 27
#: A run is shown in about so many milliseconds, its end for longer.
_PLAY_MS, _END_MS = 9000, 2500


def panel_svg(panel: RenderableType) -> str:
    """What the terminal shows, as a drawing that any browser or editor opens."""
    console = Console(
        record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor",
        legacy_windows=False, _environ={},
    )  # fmt: skip
    console.print(panel)
    return console.export_svg(title="", theme=_PAPER, code_format=_SVG, unique_id="xdlm")


def trajectory_gif(trajectory: Trajectory, tokenizer: Speller, *, sample: int = 0) -> bytes:
    """Every frame of one text; what a step changed is coloured by the kind of change."""
    painter = _Painter()
    pages = []
    for frame in range(trajectory.steps + 1):
        ids = trajectory.frames[frame, sample].tolist()
        masked = [i in trajectory.special_ids for i in ids]
        pieces = [
            MASK_BLOCK if hidden else visible(piece)
            for hidden, piece in zip(masked, tokenizer.pieces(ids), strict=True)
        ]
        colours = [
            _colour(change, hidden)
            for change, hidden in zip(changes_into(trajectory, frame, sample), masked, strict=True)
        ]
        heading = f"step {frame}/{trajectory.steps}   t = {trajectory.times[frame]:.3f}"
        pages.append((heading, pieces, colours))
    images = painter.paint(pages)
    each = max(40, min(400, _PLAY_MS // len(images)))
    durations = [each] * (len(images) - 1) + [_END_MS]
    out = io.BytesIO()
    images[0].save(
        out, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0,
        disposal=1,
    )  # fmt: skip
    return out.getvalue()


def _colour(change: Change, masked: bool) -> str:
    if change in LOOKS:
        return LOOKS[change].colour
    return MASK.colour if masked else "#202020"


Page = tuple[str, Sequence[str], Sequence[str]]


class _Painter:
    """Lays out tokens in lines, as text flows, and draws them."""

    def __init__(self) -> None:
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError as error:
            raise UserError("a GIF needs pillow: pip install 'xdlm[image]'") from error
        self.new_image, self.new_draw = Image.new, ImageDraw.Draw
        font = ImageFont.load_default(_SIZE)
        # Without FreeType pillow has a bitmap font, which knows neither sizes nor more than Latin-1.
        if not isinstance(font, ImageFont.FreeTypeFont):
            raise UserError("a GIF needs a pillow that was built with FreeType")
        self.font = font

    def paint(self, pages: Sequence[Page]) -> list[Image]:
        """All pages, as high as the highest needs; one palette, so that colours never shift."""
        flows = [list(self._flow(pieces)) for _, pieces, _ in pages]
        lines = max(line for flow in flows for _, line in flow) + 1
        height = 2 * _MARGIN + (lines + 2) * _LINE
        colours = ["#ffffff", "#202020", MASK.colour, *(look.colour for look in LOOKS.values())]
        images = []
        for (heading, pieces, marks), flow in zip(pages, flows, strict=True):
            image = self.new_image("P", (_WIDTH, height), 0)
            image.putpalette([v for c in colours for v in bytes.fromhex(c[1:])])
            draw = self.new_draw(image)
            draw.fontmode = "1"  # in a palette there is no shade between two colours
            draw.text((_MARGIN, _MARGIN), heading, fill=2, font=self.font)
            for piece, mark, place in zip(pieces, marks, flow, strict=True):
                self._write(draw, piece, colours.index(mark), place)
            images.append(image)
        return images

    def _write(self, draw: Any, piece: str, colour: int, place: tuple[float, int]) -> None:
        x, y = place[0], _MARGIN + (place[1] + 2) * _LINE
        if piece == MASK_BLOCK:  # the font has no block
            draw.rectangle((x + 1, y + 4, x + _SIZE - 3, y + _SIZE), fill=colour)
        else:
            draw.text((x, y), piece.replace("↵", "¶"), fill=colour, font=self.font)

    def _flow(self, pieces: Sequence[str]) -> Iterator[tuple[float, int]]:
        """Where each piece begins: x, and the number of its line."""
        x, line = float(_MARGIN), 0
        for piece in pieces:
            width = (
                float(_SIZE)
                if piece == MASK_BLOCK
                else self.font.getlength(piece.replace("↵", "¶"))
            )
            if x + width > _WIDTH - _MARGIN and x > _MARGIN:
                x, line = float(_MARGIN), line + 1
            yield x, line
            x += width
            if piece.endswith("↵"):
                x, line = float(_MARGIN), line + 1
