"""Images on the terminal: two pixels in every character, the upper half and the lower one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.style import Style
from rich.table import Table
from rich.text import Text

from xdlm.report.colours import LOOKS, MASK
from xdlm.report.recording import Recording
from xdlm.report.strip import BLANK
from xdlm.report.terminal import MASK_BLOCK, changes_into, frames_panel, trajectory_panel
from xdlm.structs import is_special

_UPPER, _LOWER = "▀", "▄"
#: Columns between an image and what changed in it, and lines of a screen that are no image.
_GAP, _LINES = 3, 9
_GREY = Style(color=MASK.colour)


@dataclass(frozen=True)
class ImageFrame:
    """One state of one image, and beside it what the step before did: as large as fits, at most a
    character wide for every pixel. Where all is masked it is drawn as masked text is."""

    recording: Recording
    frame: int
    sample: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        image, masked, change = self._arrays()
        factor = self._factor(len(image), console, options)
        colours = _blocks(image, factor).mean(axis=(1, 3)).round().astype(int)
        hidden = np.asarray(_blocks(masked, factor).all(axis=(1, 3)))
        row = Table.grid(padding=(0, _GAP, 0, 0))
        row.add_row(
            _picture(colours, hidden), _change_map(_blocks(change, factor).max(axis=(1, 3)))
        )
        yield row

    @staticmethod
    def _factor(side: int, console: Console, options: ConsoleOptions) -> int:
        """How many pixels of a side become one."""
        factor = -(-(2 * side + _GAP) // options.max_width)
        if console.is_terminal:  # elsewhere there is no end of lines
            factor = max(factor, -(-side // (2 * max(1, console.height - _LINES))))
        return min(factor, side)

    def _arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.bool_], NDArray[np.uint8]]:
        """Colours [h, w, 3], what is masked [h, w], what changed [h, w] (the highest of `Change`, where the
        channels of a pixel did several things)."""
        path, decoder = self.recording.trajectory, self.recording.decoder
        tokens = path.frames[self.frame, self.sample, None]
        masked = is_special(tokens, path.special_ids).numpy()
        changes = np.array(changes_into(path, self.frame, self.sample), dtype=np.uint8)
        return (
            decoder.decode(tokens.numpy(), blank=BLANK)[0],
            decoder.per_pixel(masked)[0].all(-1),
            decoder.per_pixel(changes)[0].max(-1),
        )


def recording_panel(recording: Recording, sample: int = 0, n_frames: int = 6) -> RenderableType:
    """The first frame, the last, and evenly spaced ones between, of a text or an image."""
    path = recording.trajectory
    if recording.layout is None:
        return trajectory_panel(path, recording, sample, n_frames)
    return frames_panel(
        path, sample, n_frames, lambda frame: ImageFrame(recording, frame, sample), "image"
    )


def _blocks(pixels: NDArray[Any], factor: int) -> NDArray[Any]:
    """Squares of `factor` x `factor` pixels, [h, factor, w, factor, ...]; what is over at the edges is
    left out."""
    height, width = (side // factor for side in pixels.shape[:2])
    cut = pixels[: height * factor, : width * factor]
    return cut.reshape(height, factor, width, factor, *pixels.shape[2:])


def _picture(colours: NDArray[np.integer], masked: NDArray[np.bool_]) -> Text:
    return _halves(
        [[_hex(colour) for colour in row] for row in colours],
        lambda top, column: bool(masked[top : top + 2, column].all()),
    )


def _change_map(changes: NDArray[np.integer]) -> Text:
    """What changed, in the paper's colours; nothing where nothing did."""
    looks = {int(kind): look.colour for kind, look in LOOKS.items()}
    return _halves([[looks.get(int(code)) for code in row] for row in changes])


def _halves(
    pixels: Sequence[Sequence[str | None]], masked: Callable[[int, int], bool] = lambda *_: False
) -> Text:
    """Two rows of colours in each line of text."""
    lines = []
    for top in range(0, len(pixels), 2):
        lower = pixels[top + 1] if top + 1 < len(pixels) else [None] * len(pixels[top])
        line = Text(no_wrap=True)
        for column, pair in enumerate(zip(pixels[top], lower, strict=True)):
            line.append(*((MASK_BLOCK, _GREY) if masked(top, column) else _pair(*pair)))
        lines.append(line)
    return Text("\n", no_wrap=True).join(lines)


def _pair(upper: str | None, lower: str | None) -> tuple[str, Style]:
    if upper is None:
        return (" ", Style.null()) if lower is None else (_LOWER, Style(color=lower))
    return _UPPER, Style(color=upper, bgcolor=lower)


def _hex(colour: NDArray[np.integer]) -> str:
    return f"#{bytes(colour.tolist()).hex()}"
