"""Whether two judges put the methods in the same order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from xdlm.report.study.collection import Grid, Study
from xdlm.report.study.commands import measure_again
from xdlm.report.study.page import Section
from xdlm.report.study.verdict import SURE, Estimate, Finding, Outcome, Test, agreement, unmeasured
from xdlm.report.study.writing import all_steps
from xdlm.report.tables import markdown_table

#: From so many steps on methods that are drawn exactly lie within a few per cent of each other.
CLOSE = 128
#: Of fewer pairs than this share an order says nothing about methods.
_SOME = 0.1

_COLUMNS = [
    "judges", "sampling steps", "Kendall's τ", "pairs of methods",
    f"told apart by both (> {SURE:g} standard errors)", "of these in the same order",
]  # fmt: skip


@dataclass(frozen=True)
class Agreement:
    """Of two judges about texts of so many steps. `sure`: the pairs of methods that both tell apart."""

    steps: int
    tau: float
    pairs: int
    sure: int
    opposed: list[str]
    """Those of them that they put in opposite order."""


def judges(study: Study) -> Section:
    rows, pairs = [], []
    for one, other in combinations(study.judges, 2):
        found = compare(study.written(one), study.written(other))
        rows += [
            [f"{one}, {other}", str(a.steps), f"{a.tau:.2f}", str(a.pairs), str(a.sure),
             str(a.sure - len(a.opposed))]
            for a in found
        ]  # fmt: skip
        pairs.append((f"{one} and {other}", found))
    parts = [markdown_table(_COLUMNS, rows)] if rows else [_NEEDS]
    records = [r for r in study.last if r.metric == "gen_ppl"] if rows else []
    return Section(
        "Two judges", (), parts, [_few(pairs), _many(pairs)], records=records,
        command=measure_again(study),
    )  # fmt: skip


Compared = Sequence[tuple[str, Sequence[Agreement]]]


def _few(pairs: Compared) -> Finding:
    return _finding(pairs, f"fewer than {CLOSE} steps", lambda steps: steps < CLOSE)


def _many(pairs: Compared) -> Finding:
    return _finding(pairs, f"{CLOSE} steps and more, drawn exactly", lambda steps: steps >= CLOSE)


def _finding(pairs: Compared, where: str, counts: Callable[[int], bool]) -> Finding:
    return Finding(
        f"Two judges put the methods in the same order, {where}", "one judge, GPT-2 Large",
        [_verdict(names, [a for a in found if counts(a.steps)]) for names, found in pairs],
    )  # fmt: skip


_NEEDS = "Not measured: needs texts of the same numbers of steps under two judges."


def compare(one: Grid[int], other: Grid[int]) -> list[Agreement]:
    found = []
    for steps in sorted(set(all_steps(one)) & set(all_steps(other))):
        names = [name for name in one if steps in one[name] and steps in other.get(name, {})]
        here, there = ([cells[name][steps] for name in names] for cells in (one, other))
        pairs = list(combinations(range(len(names)), 2))
        sure = [(i, j) for i, j in pairs if _apart(here[i], here[j]) and _apart(there[i], there[j])]
        opposed = [
            f"{names[i]} and {names[j]} at {steps:,} steps" for i, j in sure
            if (here[i].value < here[j].value) != (there[i].value < there[j].value)
        ]  # fmt: skip
        tau = agreement([e.value for e in here], [e.value for e in there])
        found.append(Agreement(steps, tau, len(pairs), len(sure), opposed))
    return found


def _verdict(names: str, found: Sequence[Agreement]) -> Test:
    opposed = [pair for a in found for pair in a.opposed]
    sure, pairs = sum(a.sure for a in found), sum(a.pairs for a in found)
    if not pairs:
        return unmeasured(f"texts of the same kind by {names}")
    brief = f"{sure - len(opposed)} of {sure} pairs that both tell apart, of {pairs} in all"
    words = f"{names}: {brief}"
    if sure < _SOME * pairs and not opposed:
        return Test(Outcome.NOISE, words, brief)
    if opposed:
        return Test(Outcome.FAILS, f"{words}; opposed: {_listed(opposed)}", brief)
    return Test(Outcome.HOLDS, words, brief)


def _listed(names: Iterable[str], most: int = 4) -> str:
    shown = list(names)
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + rest


def _apart(a: Estimate, b: Estimate) -> bool:
    return abs(a.value - b.value) > SURE * math.hypot(a.stderr, b.stderr)
