"""The one exception that means "your input is wrong", the near-miss hint that goes with it, and checks of
arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class UserError(ValueError):
    """Bad input from a person: one line that says what is wrong and what to do.

    The command line prints it without a traceback and exits with code 2.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when something close is known, else the list of what is."""
    names = sorted(known)
    return near_miss(word, names) or f"; known: {', '.join(names)}"


def near_miss(word: str, known: Iterable[str]) -> str:
    """The same, and nothing when nothing is close."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def check_known(what: str, value: object, known: Iterable[str]) -> None:
    """That a choice is one of those that there are."""
    names = tuple(known)
    if value not in names:
        raise UserError(f"unknown {what} '{value}'{did_you_mean(str(value), names)}")


def check_number(what: str, value: object) -> None:
    """That a value can be counted with; numpy's numbers are welcome too, a text of digits is not."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise UserError(f"{what} must be a number, got {value!r}")


def check_whole(what: str, value: Any) -> None:
    """Raise unless a value is a whole number, such as steps."""
    try:
        operator.index(value)
    except TypeError:
        raise UserError(f"{what} must be a whole number, got {value!r}") from None


def check_seed(seed: int, *, name: str = "seed") -> None:
    """Raise unless a seed fits 63 bits: larger ones would wrap around to small ones."""
    check_whole(name, seed)
    if not 0 <= seed < 2**63:
        raise UserError(f"{name} must lie in 0..2^63-1, got {seed}")
