"""Whether a finding holds, from numbers and their errors alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from xdlm.evaluation.records import EvalRecord
from xdlm.report.tables import known_error, with_error

#: A difference of so many of its standard errors is taken for real.
SURE = 2.0


class Estimate(NamedTuple):
    """A value and its standard error, not a number where that is unknown."""

    value: float
    stderr: float

    def shown(self, digits: int | None = None) -> str:
        """With two digits behind the point, one where there are three before it, or as many as asked."""
        if digits is None:
            digits = 1 if self.value >= 100 else 2
        return with_error(self.value if math.isfinite(self.value) else None, self.stderr, digits)


def estimate(record: EvalRecord) -> Estimate:
    return Estimate(math.inf if record.value is None else record.value, known_error(record))


class Outcome(StrEnum):
    HOLDS = "holds"
    NOISE = "not separated by the noise"
    FAILS = "does not hold"
    UNKNOWN = "not measured"


#: What a finding of several parts comes to: the first of these that any of its parts came to.
_GRAVEST = (Outcome.FAILS, Outcome.UNKNOWN, Outcome.NOISE, Outcome.HOLDS)


@dataclass(frozen=True)
class Test:
    """One comparison, and what it says in words."""

    outcome: Outcome
    words: str


@dataclass(frozen=True)
class Finding:
    """What the paper finds, and how that fares here."""

    claim: str
    paper: str
    """The paper's figures for it."""
    tests: list[Test]
    remark: str = ""
    """What belongs to it, whatever the outcome."""

    @property
    def outcome(self) -> Outcome:
        found = {test.outcome for test in self.tests} or {Outcome.UNKNOWN}
        return next(outcome for outcome in _GRAVEST if outcome in found)

    @property
    def here(self) -> str:
        return "; ".join(test.words for test in self.tests)

    @property
    def sentence(self) -> str:
        more = f" {self.remark}" if self.remark else ""
        here = f" ({self.here})" if self.tests else ""
        return f"{self.claim}: **{self.outcome}**{here}.{more}"


def positive(difference: Estimate, words: str) -> Test:
    """Whether a difference lies above 0 by more than chance: its value over its standard error."""
    if not math.isfinite(difference.value) or math.isnan(difference.stderr):
        return Test(Outcome.UNKNOWN, f"{words}, no error is known")
    if difference.value == 0:
        return Test(Outcome.NOISE, f"{words}, 0 standard errors")
    errors = abs(difference.value) / difference.stderr if difference.stderr else math.inf
    size = f"{errors:.1f} standard errors" if errors < math.inf else "without any error"
    if errors <= SURE:
        return Test(Outcome.NOISE, f"{words}, {size}")
    return Test(Outcome.HOLDS if difference.value > 0 else Outcome.FAILS, f"{words}, {size}")


def below(
    one: str, low: Estimate | None, other: str, high: Estimate | None, digits: int | None = None
) -> Test:
    """Whether `one` is lower than the `other`."""
    missing = [name for name, value in ((one, low), (other, high)) if value is None]
    if low is None or high is None:
        return Test(Outcome.UNKNOWN, f"{' and '.join(missing)} not measured")
    difference = Estimate(high.value - low.value, math.hypot(low.stderr, high.stderr))
    return positive(difference, f"{one} {low.shown(digits)} against {other} {high.shown(digits)}")


def under(judge: str, test: Test) -> Test:
    """The same, said to be what one judge finds."""
    return Test(test.outcome, f"{judge}: {test.words}")


def agreement(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau: pairs in the same order less pairs in the opposite one, as a share of all pairs."""
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    signs = [(one[i] - one[j]) * (other[i] - other[j]) for i, j in pairs]
    score = sum((sign > 0) - (sign < 0) for sign in signs)
    return score / len(pairs) if pairs else math.nan
