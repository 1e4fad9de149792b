"""What the machine can run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def given_or(given: Tensor | None, filler: Tensor) -> Tensor:
    """A kernel needs some pointer, even where it will not look."""
    return filler if given is None else given
