"""How models change as they are trained, and where one overtakes another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from xdlm.evaluation.records import EvalRecord
from xdlm.report.colours import series_colours
from xdlm.report.comparison import check_generation, check_perplexity, labels, real_text
from xdlm.report.figures import (
    Lines,
    Point,
    draw_lines,
    draw_real,
    folded,
    legend,
    lines_of,
    make_logarithmic,
)
from xdlm.report.plots import save_panels
from xdlm.report.tables import TextTable, put

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Course:
    """A quantity against the training step, a line per model. `ranked`: lower is better."""

    quantity: str
    lines: Lines
    ranked: bool
    real: float | None
    """What it is for real text, where that is known."""
    records: list[EvalRecord]
    """What it is made of."""
    same_steps: bool = False
    """Whether all are meant to be measured at the same steps; a line then breaks where one was left out."""


class Lead(NamedTuple):
    """From one training step to another a model is ahead of all others. `sure`: at some checkpoint in
    between by more than two standard errors of the difference to the second."""

    start: float
    stop: float
    name: str
    sure: bool


def courses(records: Sequence[EvalRecord]) -> list[Course]:
    """What was measured at two training steps of a model at least; refuses what does not compare."""
    steps: dict[str, set[int]] = {}
    for record in records:
        if record.metric in ("ppl", "gen_ppl", "entropy"):
            steps.setdefault(record.model, set()).add(record.step)
    found = [r for r in records if len(steps.get(r.model, ())) > 1]
    read = [r for r in found if r.metric == "ppl"]
    wrote = [r for r in found if r.metric in ("gen_ppl", "entropy")]
    check_perplexity(read)
    check_generation(wrote)
    label = labels([*read, *wrote])
    groups: dict[str, list[EvalRecord]] = {}
    for record in (*read, *wrote):
        groups.setdefault(_quantity(record), []).append(record)
    real = {metric: found.value for metric, found in real_text(records).items()}
    return [
        Course(
            quantity, lines_of(own, label, lambda r: float(r.step)), own[0].metric != "entropy",
            real.get(own[0].metric), own,
        )
        for quantity, own in groups.items()
    ]  # fmt: skip


def _quantity(record: EvalRecord) -> str:
    if record.metric == "ppl":
        return f"perplexity of {record.data}"
    if record.metric == "entropy":
        return f"entropy, {record.steps} steps"
    return f"generative perplexity ({record.judge}), {record.steps} steps"


def leads(lines: Lines) -> list[Lead]:
    """Who is lowest when, of lines that are straight between their points where values are drawn on a
    logarithmic axis; only where there are two lines at least."""
    found: list[Lead] = []
    steps = sorted({point.x for points in lines.values() for point in points})
    for left, right in pairwise(steps):
        there = {
            name: (_height(points, left), _height(points, right))
            for name, points in lines.items()
            if points[0].x <= left and right <= points[-1].x
        }
        if len(there) < 2:
            continue
        cuts = {left, right}
        for (a0, a1), (b0, b1) in combinations(there.values(), 2):
            before, after = a0 - b0, a1 - b1
            if before * after < 0:
                cuts.add(left + (right - left) * before / (before - after))
        for start, stop in pairwise(sorted(cuts)):
            share = ((start + stop) / 2 - left) / (right - left)
            name = min(there, key=lambda who: _between(there[who], share))
            if found and found[-1].name == name and found[-1].stop == start:
                found[-1] = found[-1]._replace(stop=stop)
            else:
                found.append(Lead(start, stop, name, sure=False))
    return [lead._replace(sure=_is_sure(lines, lead)) for lead in found]


def _height(points: Sequence[Point], x: float) -> float:
    return float(np.interp(x, [p.x for p in points], [math.log(p.y) for p in points]))


def _between(ends: tuple[float, float], share: float) -> float:
    return ends[0] + share * (ends[1] - ends[0])


def _is_sure(lines: Lines, lead: Lead) -> bool:
    for own in lines[lead.name]:
        others = [p for who, points in lines.items() if who != lead.name for p in points]
        rivals = [p for p in others if p.x == own.x]
        if lead.start <= own.x <= lead.stop and rivals:
            second = min(rivals, key=lambda p: p.y)
            if second.y - own.y > 2 * math.hypot(own.stderr, second.stderr):
                return True
    return False


def dynamics_table(found: Sequence[Course]) -> TextTable:
    """A line per quantity and model, a column per training step."""
    records = [record for course in found for record in course.records]
    label = labels(records)
    steps = [f"step {step:,}" for step in sorted({r.step for r in records})]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for course in found:
        for record in course.records:
            line = (course.quantity, label(record))
            put(cells.setdefault(line, {}), f"step {record.step:,}", record, line[1])
    rows = [[*line, *(row.get(step, "") for step in steps)] for line, row in cells.items()]
    return TextTable("Training", ["", "model", *steps], rows, records)


def crossover_table(found: Sequence[Course]) -> TextTable | None:
    """Who leads when, for what more than one model has a line of."""
    rows = [
        [course.quantity, f"{lead.start:,.0f}", f"{lead.stop:,.0f}", lead.name,
         "yes" if lead.sure else "no"]
        for course in found if course.ranked for lead in leads(course.lines)
    ]  # fmt: skip
    columns = ["", "from step", "to step", "best", "by more than 2 standard errors"]
    return TextTable("Who leads when", columns, rows, []) if rows else None


def plot_dynamics(found: Sequence[Course], file: Path, *, small: bool = False) -> None:
    """A panel per quantity. The ground is shaded in the colour of the model that leads, and hatched
    where its lead may be chance."""
    colours = series_colours(name for course in found for name in course.lines)

    def panel(course: Course) -> Callable[[Axes], None]:
        return lambda axes: _draw(axes, course, colours)

    save_panels(file, [panel(course) for course in found], small=small)


def interrupted(lines: Lines) -> Lines:
    """With a gap in a line where others were measured and it was not."""
    steps = sorted({point.x for points in lines.values() for point in points})
    drawn: Lines = {}
    for name, points in lines.items():
        there = {point.x: point for point in points}
        span = [x for x in steps if points[0].x <= x <= points[-1].x]
        drawn[name] = [there.get(x, Point(x, math.nan, math.nan)) for x in span]
    return drawn


def _draw(axes: Axes, course: Course, colours: dict[str, str]) -> None:
    from matplotlib.ticker import EngFormatter

    ahead = leads(course.lines) if course.ranked else []
    for lead in ahead:
        axes.axvspan(
            lead.start, lead.stop, color=colours[lead.name], linewidth=0, fill=lead.sure,
            hatch=None if lead.sure else "//", alpha=0.13 if lead.sure else 0.3,
        )  # fmt: skip
    draw_lines(axes, interrupted(course.lines) if course.same_steps else course.lines, colours)
    draw_real(axes, course.real)
    if course.ranked:
        make_logarithmic(axes, "y")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    ground = " (ground: who leads; hatched: by less than 2 standard errors)" if ahead else ""
    axes.set_xlabel("training step" + ground)
    axes.set_ylabel(folded(course.quantity))
    legend(axes)
