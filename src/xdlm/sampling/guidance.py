"""Classifier-free guidance by a label: `log p = s log p_with + (1 - s) log p_without`, s = 1 is off.

What some papers call gamma or w is s - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xdlm.errors import UserError, check_known, check_number

_MAX_SCALE = 100.0
#: What is applied of s - 1 at time t, from 1 (noise) to 0 (data).
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "rising": lambda t: 1 - t,
    "falling": lambda t: t,
    "middle": lambda t: 4 * t * (1 - t),
}


@dataclass(frozen=True)
class Guidance:
    """How far predictions are led away from what the model says without a label."""

    scale: float = 1.0
    """s; 1 is off, 2 the paper's."""
    schedule: str = "constant"
    """constant, rising (from 1 at the start to the scale at the end), falling (the reverse) or middle (the
    scale at half time, 1 at both ends)."""

    def __post_init__(self) -> None:
        check_number("guidance", self.scale)
        if not 0 <= self.scale <= _MAX_SCALE:
            raise UserError(f"guidance must lie in [0, {_MAX_SCALE:.0f}], got {self.scale}")
        check_known("schedule of guidance", self.schedule, SCHEDULES)

    def at(self, t: float) -> float:
        """The scale at time t."""
        return 1 + (self.scale - 1) * SCHEDULES[self.schedule](t)
