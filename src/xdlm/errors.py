"""The one exception that means "your input is wrong", and the near-miss hint that goes with it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


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
