"""The paper's colours, in one place, so that terminal, page and figures tell the same story."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xdlm.sampling import Change


@dataclass(frozen=True)
class Look:
    """How one kind of change is drawn, and what the legend says about it."""

    colour: str
    name: str
    meaning: str


#: A position that holds a mask.
MASK = Look("#696969", "masked", "no token yet")

#: The three kinds of change, in the order in which legends and stacked bars show them.
LOOKS: dict[Change, Look] = {
    Change.UNMASK: Look("#228B22", "unmasked", "mask → token"),
    Change.REFINE: Look("#4169E1", "refined", "token → token"),
    Change.REMASK: Look("#B31B1B", "remasked", "token → mask"),
}

#: Colours of lines, told apart by most of those who do not see all colours (Okabe and Ito).
_SERIES = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31",
)  # fmt: skip


def series_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, in their order; they repeat after eight."""
    return {name: _SERIES[i % len(_SERIES)] for i, name in enumerate(dict.fromkeys(names))}
