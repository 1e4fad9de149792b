"""What the machine can run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None
