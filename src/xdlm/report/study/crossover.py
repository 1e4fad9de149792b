"""From how many sampling steps on masked noise writes better than mixed noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from xdlm.report.colours import series_colours
from xdlm.report.figures import Lines, Point, draw_by_steps
from xdlm.report.plots import save_panels
from xdlm.report.study import paper
from xdlm.report.study.collection import Grid
from xdlm.report.study.likelihood import MASKED, MIXED
from xdlm.report.study.verdict import SURE, Estimate, difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def by_steps(table: paper.PaperTable) -> Grid[int]:
    """A table of the paper whose columns are numbers of steps, as if it had been measured here."""
    return {
        name: {int(n): Estimate(float(figure), 0.0)
               for n, figure in zip(table.columns, figures, strict=True)}
        for name, figures in table.rows.items()
    }  # fmt: skip


PAPER = by_steps(paper.OWT_QUALITY)


def crossing(lower: Mapping[int, float], higher: Mapping[int, float]) -> list[float]:
    """Where two lines that are straight on logarithmic axes cross."""
    gaps = {n: math.log(lower[n] / higher[n]) for n in sorted(set(lower) & set(higher))}
    found = []
    for left, right in pairwise(gaps):
        a, b = gaps[left], gaps[right]
        if a * b < 0:
            found.append(math.exp(math.log(left) + math.log(right / left) * a / (a - b)))
    return found


def crossings(judged: Mapping[str, Grid[int]]) -> str:
    """From how many steps on masked noise writes better."""

    def told(cells: Mapping[str, Mapping[int, float]]) -> str:
        places = crossing(cells.get(MIXED, {}), cells.get(MASKED, {}))
        return " and ".join(f"at {n:,.0f} steps" for n in places) or "nowhere"

    ours = [f"under {judge} {told(_values(cells))}" for judge, cells in judged.items()]
    if not ours:
        return ""
    places = f"{MIXED} and {MASKED} change places {', '.join(ours)}; in the paper {told(_values(PAPER))}."
    sure = [f"under {judge} {ahead(cells)}" for judge, cells in judged.items()]
    return f"{places} Ahead by more than {SURE:g} standard errors are {'; '.join(sure)}."


def ahead(cells: Grid[int]) -> str:
    """At which numbers of steps each of the two is surely better: where lines cross there is no error."""
    mixed, masked = cells.get(MIXED, {}), cells.get(MASKED, {})
    leads = {n: difference(masked[n], mixed[n]) for n in sorted(set(mixed) & set(masked))}
    sure = {n: lead.value for n, lead in leads.items() if abs(lead.value) > SURE * lead.stderr}
    better = {MIXED: [n for n in sure if sure[n] > 0], MASKED: [n for n in sure if sure[n] < 0]}
    told = [
        f"{name} at {', '.join(f'{n:,}' for n in own) or 'none'}" for name, own in better.items()
    ]
    return " and ".join(told)


def _values(cells: Grid[int]) -> dict[str, dict[int, float]]:
    return {
        name: {n: found.value for n, found in row.items() if math.isfinite(found.value)}
        for name, row in cells.items()
    }


def against_masked(cells: Grid[int]) -> Lines:
    """Perplexities divided by masked noise's at as many steps; for two that are independent, relative
    errors add in squares: (se(a / b) / (a / b))^2 = (se(a) / a)^2 + (se(b) / b)^2."""
    reference = {n: e for n, e in cells.get(MASKED, {}).items() if math.isfinite(e.value)}
    drawn: Lines = {}
    for name, row in cells.items():
        for steps in sorted(set(row) & set(reference)):
            one, other = row[steps], reference[steps]
            if not math.isfinite(one.value):
                continue
            ratio = one.value / other.value
            relative = math.hypot(one.stderr / one.value, other.stderr / other.value)
            stderr = 0.0 if name == MASKED else ratio * relative
            drawn.setdefault(name, []).append(Point(float(steps), ratio, stderr))
    return drawn


def plot_mixed(file: Path, judged: Mapping[str, Mapping[str, Grid[int]]]) -> None:
    """Mixed noise beside masked noise, a panel for each judge with a line for all that is named, and the
    paper's."""
    named = {judge: {**cells, "the paper, GPT-2 Large": PAPER} for judge, cells in judged.items()}
    colours = series_colours(
        list(dict.fromkeys(name for cells in named.values() for name in cells))
    )

    def panel(judge: str, cells: Mapping[str, Grid[int]]) -> Callable[[Axes], None]:
        drawn = {name: against_masked(one).get(MIXED, []) for name, one in cells.items()}
        lines: Lines = {name: line for name, line in drawn.items() if line}
        title = f"perplexity of {MIXED} / {MASKED}'s ({judge})"
        return lambda axes: draw_by_steps(axes, lines, colours, title, None)

    save_panels(file, [panel(*one) for one in named.items()], small=True)


def plot_crossover(methods: Sequence[str], judged: Mapping[str, Grid[int]], file: Path) -> None:
    """Quality beside masked noise's, by each judge, and in the paper."""
    colours = series_colours(methods)
    theirs = {name: row for name, row in PAPER.items() if name in colours}

    def panel(cells: Grid[int], who: str) -> Callable[[Axes], None]:
        title = f"perplexity / {MASKED}'s ({who})"
        return lambda axes: draw_by_steps(axes, against_masked(cells), colours, title, None)

    panels = [panel(cells, judge) for judge, cells in judged.items()]
    save_panels(file, [*panels, panel(theirs, "the paper, GPT-2 Large")], small=True)
