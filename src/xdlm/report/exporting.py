"""A recording as a file, in the format that the file's name asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from xdlm.errors import UserError, did_you_mean
from xdlm.files import write_atomic
from xdlm.report.html import trajectory_page
from xdlm.report.pictures import trajectory_gif, trajectory_svg
from xdlm.report.recording import Recording


def _html(recording: Recording, title: str) -> str:
    return trajectory_page(recording.trajectory, recording, title=title, details=recording.details)


#: By the end of the file's name. Pages and data hold all texts, pictures the first.
FORMATS: dict[str, Callable[[Recording, str], str | bytes]] = {
    "html": _html,
    "json": lambda recording, title: recording.to_json(),
    "svg": lambda recording, title: trajectory_svg(recording.trajectory, recording),
    "gif": lambda recording, title: trajectory_gif(recording.trajectory, recording),
}


def check_format(file: Path) -> str:
    """The format that the name of a file asks for."""
    name = file.suffix.removeprefix(".").lower()
    if name not in FORMATS:
        raise UserError(
            f"a trajectory is written as {', '.join(f'.{known}' for known in FORMATS)}: '{file}' ends in "
            f"none of them{did_you_mean(name, FORMATS) if name else ''}"
        )
    return name


def export(recording: Recording, file: Path, *, title: str) -> None:
    """Write a recording in the format that the name of the file asks for."""
    write_atomic(file, FORMATS[check_format(file)](recording, title))
