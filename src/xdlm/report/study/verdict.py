"""Whether a finding holds, from numbers and their errors alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from xdlm.evaluation.records import EvalRecord
from xdlm.report.tables import known_error, with_error

#: A difference of so many of its standard errors is taken for real.
SURE = 2.0


class Estimate(NamedTuple):
    """A value and its standard error, not a number where that is unknown."""

    value: float
    stderr: float
    shares: tuple[tuple[float, ...], ...] = ()
    """For each text that it is of, what each row adds to it; in the same order for all models."""

    def shown(self, digits: int | None = None) -> str:
        """With two digits behind the point, or one for what is large and not that sure, or as asked; what
        is sure alone."""
        if digits is None:
            digits = 1 if self.value >= 100 and not self.stderr < 0.1 else 2
        value = self.value if math.isfinite(self.value) else None
        return with_error(value, self.stderr or None, digits)

    def plain(self) -> str:
        """Without its error."""
        return self.shown().split(" ")[0]


def estimate(record: EvalRecord) -> Estimate:
    """To first order, a row's nats r add `value r / tokens` to a perplexity."""
    value = math.inf if record.value is None else record.value
    if record.row_nats is None or not math.isfinite(value):
        return Estimate(value, known_error(record))
    weight = value / record.details["tokens"]
    return Estimate(value, known_error(record), (tuple(weight * r for r in record.row_nats),))


def mean_of(parts: Sequence[Estimate], mean: Estimate) -> Estimate:
    """The known mean of several texts' estimates, with the shares of their rows if all have them."""
    if not parts or not all(part.shares for part in parts):
        return mean
    shares = (share for part in parts for share in part.shares)
    return mean._replace(shares=tuple(tuple(s / len(parts) for s in share) for share in shares))


def difference(one: Estimate, other: Estimate) -> Estimate:
    """How much higher `one` is."""
    return combination([(1.0, one), (-1.0, other)])


def combination(terms: Sequence[tuple[float, Estimate]]) -> Estimate:
    """The sum of weight times estimate. Where all tell what each row adds, its error is the scatter of the
    rows' own sums: what makes a row hard for every model cancels in a difference. Otherwise they count as
    independent."""
    value = math.fsum(weight * e.value for weight, e in terms)
    sizes = [[len(share) for share in e.shares] for _, e in terms]
    if any(own != sizes[0] for own in sizes) or min(sizes[0], default=0) < 3:
        return Estimate(value, math.hypot(*(weight * e.stderr for weight, e in terms)))
    weights = np.array([weight for weight, _ in terms])
    sums = [weights @ np.array(text) for text in zip(*(e.shares for _, e in terms), strict=True)]
    # Neighbours stand for similar times, as in the error of one: only second differences are chance.
    variance = math.fsum(len(rows) * float(np.mean(np.diff(rows, n=2) ** 2)) / 6 for rows in sums)
    return Estimate(value, math.sqrt(variance), tuple(tuple(rows.tolist()) for rows in sums))


def logarithm(found: Estimate) -> Estimate:
    """To first order: what changes it by a share of its value changes its logarithm by that share."""
    shares = tuple(tuple(s / found.value for s in share) for share in found.shares)
    return Estimate(math.log(found.value), found.stderr / found.value, shares)


def pooled(parts: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates under weights w = 1 / se^2, which make its error the smallest:
    1 / sqrt(sum w). Where an error is not known, so is that of the mean."""
    if not all(part.stderr > 0 for part in parts):
        return Estimate(math.fsum(part.value for part in parts) / len(parts), math.nan)
    weights = [part.stderr**-2 for part in parts]
    total = math.fsum(weights)
    sums = math.fsum(w * part.value for w, part in zip(weights, parts, strict=True))
    return Estimate(sums / total, total**-0.5)


def across(trainings: Sequence[Estimate]) -> Estimate:
    """The mean over trainings, which differ by more than the errors of their own texts: weights
    1 / (se^2 + tau^2), where tau^2 is how much they vary beyond that (DerSimonian and Laird 1986),

        tau^2 = max(0, (Q - (k - 1)) / (W - sum w^2 / W)),  Q = sum w (y - pooled)^2,

    with w = 1 / se^2 and W their sum. Of two or three trainings that is a rough guess, but 0 is a worse
    one: if there is no difference, two such errors are exceeded in about one case of six."""
    if len(trainings) < 2 or not all(one.stderr > 0 for one in trainings):
        return pooled(trainings)
    mean = pooled(trainings).value
    weights = [one.stderr**-2 for one in trainings]
    total = math.fsum(weights)
    spread = math.fsum(
        w * (one.value - mean) ** 2 for w, one in zip(weights, trainings, strict=True)
    )
    own = total - math.fsum(w * w for w in weights) / total
    between = max(0.0, (spread - (len(trainings) - 1)) / own)
    return pooled([Estimate(one.value, math.hypot(one.stderr, between**0.5)) for one in trainings])


class Outcome(StrEnum):
    HOLDS = "holds"
    NOISE = "not separated by the noise"
    FAILS = "does not hold"
    UNKNOWN = "not measured"


#: What a finding of several parts comes to: the first of these that any of its parts came to.
_GRAVEST = (Outcome.FAILS, Outcome.UNKNOWN, Outcome.NOISE, Outcome.HOLDS)


@dataclass(frozen=True)
class Test:
    """One comparison, and what it says in words; `brief` in as few as will do."""

    outcome: Outcome
    words: str
    brief: str


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


def unmeasured(*names: str) -> Test:
    words = f"{' and '.join(names)} not measured"
    return Test(Outcome.UNKNOWN, words, words)


def positive(difference: Estimate, words: str, brief: str) -> Test:
    """Whether a difference lies above 0 by more than chance: its value over its standard error."""
    if not math.isfinite(difference.value) or math.isnan(difference.stderr):
        unknown = "no error is known"
        return Test(Outcome.UNKNOWN, f"{words}, {unknown}", f"{brief} ({unknown})")
    outcome = Outcome.HOLDS if difference.value > 0 else Outcome.FAILS
    if abs(difference.value) <= SURE * difference.stderr:
        outcome = Outcome.NOISE
    if not difference.stderr:
        return Test(outcome, f"{words}, without error", brief)
    errors = abs(difference.value) / difference.stderr
    return Test(outcome, f"{words}, {errors:.1f} standard errors", f"{brief} ({errors:.1f} se)")


def below(
    one: str, low: Estimate | None, other: str, high: Estimate | None, digits: int | None = None
) -> Test:
    """Whether `one` is lower than the `other`."""
    if low is None or high is None:
        return unmeasured(*(name for name, e in ((one, low), (other, high)) if e is None))
    lead = difference(high, low)
    sign = "<" if lead.value > 0 else ">" if lead.value < 0 else "="
    words = f"{one} {low.shown(digits)} {sign} {other} {high.shown(digits)}"
    return positive(lead, words, f"{low.plain()} {sign} {high.plain()}")


def under(judge: str, test: Test) -> Test:
    """The same, said to be what one judge finds."""
    return Test(test.outcome, f"{judge}: {test.words}", f"{judge}: {test.brief}")


def agreement(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau: pairs in the same order less pairs in the opposite one, as a share of all pairs."""
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    signs = [(one[i] - one[j]) * (other[i] - other[j]) for i, j in pairs]
    score = sum((sign > 0) - (sign < 0) for sign in signs)
    return score / len(pairs) if pairs else math.nan
