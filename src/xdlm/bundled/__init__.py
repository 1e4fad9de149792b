"""Models that ship with the package, by name."""

from __future__ import annotations

from pathlib import Path

NAMES = ("pocket",)


def bundled_folder(name: str) -> Path | None:
    """Where a bundled model lies; None if there is none of that name."""
    return Path(__file__).parent / name if name in NAMES else None
