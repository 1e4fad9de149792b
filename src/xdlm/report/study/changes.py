"""What each sampling step does to the tokens: mask to token, token to token, token to mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from xdlm.evaluation.records import EvalRecord
from xdlm.report.colours import LOOKS
from xdlm.report.comparison import method_of
from xdlm.report.figures import legend
from xdlm.report.plots import clean, save_panels
from xdlm.report.study import paper
from xdlm.report.study.collection import Study
from xdlm.report.study.commands import measure_again
from xdlm.report.study.likelihood import MASKED, MIXED
from xdlm.report.study.page import Section, fold, missing
from xdlm.report.study.verdict import Estimate, Finding, Outcome, Test, positive, unmeasured
from xdlm.report.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The steps of the trajectory that the paper looks at.
STEPS = 32
KINDS = ("unmask", "refine", "remask")
_TITLE = (
    "*Changes per text over all steps and the final denoise (errors as of Poisson's counts, or wider where "
    "texts scatter more; none where every position changes once):*"
)
_MEANING = dict(zip(KINDS, LOOKS.values(), strict=True))


@dataclass(frozen=True)
class Counts:
    """How many positions of a text each step changes, on average over `n` texts; the last entry is the
    final denoise."""

    per_step: dict[str, list[float]]
    n: int
    scatter: float = 1.0
    """How much more texts differ than Poisson's counts would."""

    def total(self, kind: str, part: slice = slice(None)) -> Estimate:
        """Over steps. The mean m of n counts of Poisson's has the error √(m/n)."""
        value = math.fsum(self.per_step[kind][part])
        if kind == "unmask" and part == slice(None) and self._only_unmasks:
            return Estimate(value, 0.0)  # as many as the text has positions, in every text
        return Estimate(value, self.scatter * math.sqrt(value / self.n))

    @property
    def _only_unmasks(self) -> bool:
        return not any(map(any, (self.per_step["refine"], self.per_step["remask"])))


def counts_of(record: EvalRecord) -> Counts:
    """From details that are called unmask/0007 and so on; what is not there did not happen. Texts scatter
    as their numbers of refined tokens do, whose error was measured, and no less than Poisson's."""
    size = 1 + max((int(key.split("/")[1]) for key in record.details if "/" in key), default=0)
    steps = {
        kind: [record.details.get(f"{kind}/{step:04d}", 0.0) for step in range(size)]
        for kind in KINDS
    }
    counts = Counts(steps, record.n)
    plain = counts.total("refine").stderr
    known = plain > 0 and record.stderr is not None
    return replace(counts, scatter=max(1.0, (record.stderr or 0.0) / plain)) if known else counts


def transitions(study: Study) -> Section:
    records = study.of("transitions")
    numbers = sorted({r.steps for r in records if r.steps is not None})
    shown = STEPS if STEPS in numbers or not numbers else min(numbers, key=lambda n: abs(n - STEPS))
    found = {n: _by_method([r for r in records if r.steps == n], study) for n in numbers}
    own = found.get(shown, {})
    others = {n: counts for n, counts in found.items() if n != shown}
    parts = [f"{_TITLE}\n\n{_table({shown: own})}"] if own else []
    parts += [fold("The same in other numbers of steps", _table(others))] if others else []
    parts += [_beside_paper(own[MIXED])] if MIXED in own and shown == STEPS else []
    parts += missing(paper.METHODS, own, f"changes in {shown} steps, step {study.step:,}")
    return Section(
        "What sampling steps do", ("tab:case_lm1b_progress",), parts,
        [_kinds(own, shown), _fades(own, shown)],
        {"transitions": lambda file: _plot(own, shown, file)} if own else {}, records, measure_again(study),
    )  # fmt: skip


def _beside_paper(counts: Counts) -> str:
    """Between the steps that the paper shows a text at."""
    marks = [int(mark) for mark in paper.TRAJECTORY.columns]
    parts = [slice(before, mark) for before, mark in pairwise([0, *marks])]
    heads = [f"{part.start + 1} to {part.stop}" if part.stop - part.start > 1 else f"{part.stop}"
             for part in parts]  # fmt: skip
    rows = []
    for kind in KINDS:
        look = _MEANING[kind]
        own = [counts.total(kind, part) for part in parts]
        rows.append([f"{look.name}, a text here", *(found.shown() for found in own)])
        rows.append([f"{look.name}, the paper's text", *paper.TRAJECTORY.rows[kind]])
    theirs = f"the paper's <code>{paper.TRAJECTORY.label}</code>, {paper.TRAJECTORY.about}"
    title = (
        f"*{MIXED} on its way, beside {theirs} (numbers are not of one scale: here are 256 tokens and not "
        "128, and every change counts, where the paper colours what differs from the line before):*"
    )
    return f"{title}\n\n{markdown_table(['steps', *heads], rows)}"


def _by_method(records: Sequence[EvalRecord], study: Study) -> dict[str, Counts]:
    found = {method_of(record): counts_of(record) for record in records}
    return {method: found[method] for method in study.methods if method in found}


def _kinds(found: dict[str, Counts], steps: int) -> Finding:
    claim = f"{MIXED} unmasks, refines and masks again; {MASKED} only unmasks ({steps} steps)"
    return Finding(
        claim, "one trajectory of 32 steps", [*_all_happen(found), *_only_unmasks(found)]
    )


def _all_happen(found: dict[str, Counts]) -> list[Test]:
    if MIXED not in found:
        return [unmeasured(MIXED)]
    totals = {kind: found[MIXED].total(kind) for kind in KINDS}
    least = min(totals.values(), key=lambda total: total.value)
    words = ", ".join(f"{kind} {total.shown()}" for kind, total in totals.items())
    return [
        positive(
            least,
            f"{MIXED}, a text: {words}; the rarest",
            f"{MIXED}: rarest kind {least.plain()} a text",
        )
    ]


def _only_unmasks(found: dict[str, Counts]) -> list[Test]:
    if MASKED not in found:
        return [unmeasured(MASKED)]
    other = sum(found[MASKED].total(kind).value for kind in ("refine", "remask"))
    outcome = Outcome.FAILS if other else Outcome.HOLDS
    words = f"{MASKED}: {other:g} refined or remasked"
    return [Test(outcome, f"{words} a text", words)]


def _fades(found: dict[str, Counts], steps: int) -> Finding:
    claim = f"{MIXED}'s masking of tokens fades: fewer in the last quarter of the steps than in the first"
    paper_says = "none in the last quarter of one trajectory"
    if MIXED not in found:
        return Finding(claim, paper_says, [unmeasured(MIXED)])
    quarter = max(steps // 4, 1)
    first = found[MIXED].total("remask", slice(quarter))
    last = found[MIXED].total("remask", slice(steps - quarter, steps))
    difference = Estimate(first.value - last.value, math.hypot(first.stderr, last.stderr))
    words = f"{first.shown()} a text in the first {quarter} steps, {last.shown()} in the last"
    brief = f"{first.plain()} to {last.plain()}"
    remark = (
        "The paper says that it disappears entirely in the end; here "
        f"{last.shown()} a text are left in the last quarter."
    )
    remark = remark if last.value else ""
    return Finding(claim, paper_says, [positive(difference, words, brief)], remark)


def _table(found: dict[int, dict[str, Counts]]) -> str:
    heads = [f"{look.name} ({look.meaning})" for look in _MEANING.values()]
    rows = [
        [method, f"{steps:,}", *(counts.total(kind).shown() for kind in KINDS)]
        for steps, own in found.items() for method, counts in own.items()
    ]  # fmt: skip
    return markdown_table(["", "steps", *heads], rows)


def _plot(found: dict[str, Counts], steps: int, file: Path) -> None:
    def panel(method: str, counts: Counts) -> Callable[[Axes], None]:
        return lambda axes: _draw(axes, method, counts, steps)

    panels = [panel(method, counts) for method, counts in found.items()]
    save_panels(file, panels, small=True)


def _draw(axes: Axes, method: str, counts: Counts, steps: int) -> None:
    base = [0.0] * len(counts.per_step[KINDS[0]])
    for kind, look in _MEANING.items():
        heights = counts.per_step[kind]
        axes.bar(range(1, len(base) + 1), heights, width=0.85, bottom=base, color=look.colour,
                 label=f"{look.name} ({look.meaning})")  # fmt: skip
        base = [a + b for a, b in zip(base, heights, strict=True)]
    clean(axes)
    axes.set_title(method)
    axes.set_xlabel(f"sampling step of {steps}; the last is the final denoise")
    axes.set_ylabel("changes per text")
    legend(axes)
