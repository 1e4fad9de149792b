"""A recording as a file, in the format that the file's name asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from xdlm.errors import UserError, did_you_mean
from xdlm.files import check_file, write_atomic
from xdlm.report.blocks import recording_panel
from xdlm.report.grid import image_grid
from xdlm.report.html import trajectory_page
from xdlm.report.pictures import panel_svg, trajectory_gif
from xdlm.report.recording import Recording
from xdlm.report.strip import gif, states

#: Pixels that a film of images has across, at least.
_FILM_WIDTH = 256


def _html(recording: Recording, title: str) -> str:
    return trajectory_page(
        recording.trajectory, recording, title=title, details=recording.details,
        layout=recording.layout,
    )  # fmt: skip


def _svg(recording: Recording, title: str) -> str:
    return panel_svg(recording_panel(recording))


def _gif(recording: Recording, title: str) -> bytes:
    path = recording.trajectory
    if recording.layout is None:
        return trajectory_gif(path, recording)
    every = [states(path, recording.decoder, i) for i in range(path.frames.shape[1])]
    pages = np.stack([image_grid(images) for images in np.stack(every, axis=1)])
    return gif(pages, zoom=-(-_FILM_WIDTH // pages.shape[2]))


#: By the end of the file's name. Pages and data hold all samples, films all images or the first text,
#: drawings the first sample.
FORMATS: dict[str, Callable[[Recording, str], str | bytes]] = {
    "html": _html,
    "json": lambda recording, title: recording.to_json(),
    "svg": _svg,
    "gif": _gif,
}


def check_target(file: Path) -> None:
    """That a recording can be written there: before it is made, not after."""
    _format_of(file)
    check_file(file)


def _format_of(file: Path) -> str:
    """The format that the name of a file asks for."""
    name = file.suffix.removeprefix(".").lower()
    if name not in FORMATS:
        hint = did_you_mean(file.suffix.lower(), [f".{known}" for known in FORMATS])
        raise UserError(f"'{file}' does not end like a trajectory format{hint}")
    return name


def export(recording: Recording, file: Path, *, title: str) -> None:
    """Write a recording in the format that the name of the file asks for."""
    write_atomic(file, FORMATS[_format_of(file)](recording, title))
