"""Models that ship with the package, by name."""

from __future__ import annotations

from pathlib import Path

#: The same model and text under three kinds of noise, and a judge of what they write.
NAMES = ("pocket", "pocket-mdlm", "pocket-xdlm", "pocket-udlm", "pocket-judge")
#: What is meant where no other name is given.
_DEFAULT = {"pocket": "pocket-xdlm"}


def bundled_folder(name: str) -> Path | None:
    """Where a bundled model lies; None if there is none of that name."""
    return Path(__file__).parent / _DEFAULT.get(name, name) if name in NAMES else None
