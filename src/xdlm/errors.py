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
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}"
