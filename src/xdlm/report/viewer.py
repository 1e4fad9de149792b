"""A recording on the terminal, to be scrubbed by keys."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from xdlm.errors import UserError
from xdlm.report.blocks import ImageFrame
from xdlm.report.recording import Recording
from xdlm.report.terminal import frame_text, heading, legend

KEYS = "← → step   ↑ ↓ sample   Home End   space play   q quit"
_ESCAPES = {
    b"\x1b[D": "left", b"\x1b[C": "right", b"\x1b[A": "up", b"\x1b[B": "down",
    b"\x1bOD": "left", b"\x1bOC": "right", b"\x1bOA": "up", b"\x1bOB": "down",
    b"\x1b[H": "home", b"\x1b[F": "end", b"\x1bOH": "home", b"\x1bOF": "end",
    b"\x1b[1~": "home", b"\x1b[4~": "end",
    b"h": "left", b"l": "right", b"k": "up", b"j": "down", b"g": "home", b"G": "end",
    b" ": "play", b"q": "quit", b"\x1b": "quit", b"\x04": "quit", b"": "quit",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """What is on the screen, and whether time goes on by itself."""

    frame: int
    sample: int
    playing: bool = False

    def after(self, key: str, recording: Recording) -> Place:
        """Where a key leads."""
        last, n = recording.trajectory.steps, recording.trajectory.frames.shape[1]
        if key == "play":
            return replace(self, frame=0 if self.frame == last else self.frame,
                           playing=not self.playing)  # fmt: skip
        frames = {"left": self.frame - 1, "right": self.frame + 1, "home": 0, "end": last}
        samples = {"up": self.sample - 1, "down": self.sample + 1}
        frame = max(0, min(last, frames.get(key, self.frame)))
        sample = max(0, min(n - 1, samples.get(key, self.sample)))
        return Place(frame, sample)

    def tick(self, recording: Recording) -> Place:
        """A moment later, while playing."""
        frame = self.frame + 1
        return replace(self, frame=frame, playing=frame < recording.trajectory.steps)


def frame_panel(recording: Recording, place: Place) -> Panel:
    """One frame of one text or image, with what led to it and what the keys do."""
    path = recording.trajectory
    head = heading(path, place.frame, place.sample)
    n = path.frames.shape[1]
    if n > 1:
        head.append(f"  {recording.kind} {place.sample + 1}/{n}", "dim")
    body = Group(head, Text(), _frame(recording, place))
    return Panel(body, title=Text(KEYS, "dim"), subtitle=legend(), padding=(1, 2))


def _frame(recording: Recording, place: Place) -> RenderableType:
    if recording.layout is not None:
        return ImageFrame(recording, place.frame, place.sample)
    path = recording.trajectory
    pieces = recording.pieces(path.frames[place.frame, place.sample].tolist())
    return frame_text(path, pieces, place.frame, place.sample)


def scrub(recording: Recording, console: Console, *, sample: int = 0) -> None:
    """Show a recording until q is pressed; arrow keys lead through it."""
    place = Place(0, sample)
    seconds = max(0.04, min(0.4, 9 / max(1, recording.trajectory.steps)))
    with _keys() as next_key, Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(frame_panel(recording, place), refresh=True)
            key = next_key(seconds if place.playing else None)
            if key == "quit":
                return
            place = place.tick(recording) if key is None else place.after(key, recording)


class _keys:
    """Single keys from the terminal, without waiting for a line; its settings come back at the end."""

    def __enter__(self) -> Callable[[float | None], str | None]:
        try:
            import termios
            import tty
        except ImportError as error:
            raise UserError(
                "keys can be read on Unix alone; print the frames: xdlm view FILE --frames 6"
            ) from error
        self.descriptor = os.open("/dev/tty", os.O_RDONLY)
        self.before = termios.tcgetattr(self.descriptor)
        tty.setcbreak(self.descriptor)
        return self._next

    def __exit__(self, *error: object) -> None:
        import termios

        termios.tcsetattr(self.descriptor, termios.TCSADRAIN, self.before)
        os.close(self.descriptor)

    def _next(self, seconds: float | None) -> str | None:
        """The next key by name; None when the time is over. Keys that mean nothing are passed over."""
        while True:
            if not select.select([self.descriptor], [], [], seconds)[0]:
                return None
            # An arrow arrives as several bytes at once; a lone escape is alone.
            pressed = os.read(self.descriptor, 16)
            if pressed in _ESCAPES:
                return _ESCAPES[pressed]
