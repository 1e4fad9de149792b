"""`xdlm view`: look at a recorded trajectory in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from xdlm.cli.options import parse, positional, shown_as
from xdlm.cli.progress import console
from xdlm.errors import UserError
from xdlm.report.blocks import recording_panel
from xdlm.report.exporting import check_target, export
from xdlm.report.recording import read_recording
from xdlm.report.viewer import scrub

_DESCRIPTION = """Look at a trajectory that `xdlm sample` or `xdlm paint` wrote with --trajectory FILE.json.

On a terminal, left and right move through the steps, up and down through the texts or images; space plays,
q quits. Without a terminal, or with --frames, a few frames are printed. An image is drawn with two pixels
per character, next to a map of what changed; a code is shown as one colour, since the file has no codec.

examples:
  xdlm view run.json
  xdlm view run.json --sample 2 --frames 10
  xdlm view run.json --to run.gif
  xdlm paint --n 4 --trajectory images.json && xdlm view images.json
"""


@dataclass(frozen=True)
class Options:
    file: Annotated[str, positional(), shown_as("FILE")]
    """The recording, as JSON."""
    sample: int = 1
    """Which text or image, from 1."""
    frames: int | None = None
    """Print this many frames, evenly spaced, instead of waiting for keys."""
    to: str | None = None
    """Write it as .html, .svg, .gif or .json instead; pictures show the first text, films all images."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm view", description=_DESCRIPTION)
    if options.to is not None:
        check_target(Path(options.to))
    if options.frames is not None and options.frames < 1:
        raise UserError(f"--frames must be at least 1, got {options.frames}")
    recording = read_recording(Path(options.file))
    n = recording.trajectory.frames.shape[1]
    if not 1 <= options.sample <= n:
        raise UserError(f"--sample must lie in 1..{n}, got {options.sample}")
    if options.to is not None:
        export(recording, Path(options.to), title=f"How the {recording.kind} came about")
        print(f"-> {options.to}")
        return
    screen = console(stderr=False)
    if options.frames is None and screen.is_terminal and sys.stdin.isatty():
        scrub(recording, screen, sample=options.sample - 1)
        return
    screen.print(recording_panel(recording, options.sample - 1, options.frames or 6))
