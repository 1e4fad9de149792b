"""The paper's colours, in one place, so that terminal, page and figures tell the same story."""

from __future__ import annotations

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
