"""Understanding against generation over the mixing ratio: the frontier, and the line that the ends span."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xdlm.errors import UserError
from xdlm.evaluation.perplexity import ZERO_SHOT_MEAN
from xdlm.report.plots import save_panels
from xdlm.report.study import paper
from xdlm.report.study.collection import Study
from xdlm.report.study.commands import measure_again
from xdlm.report.study.likelihood import MASKED, MIXED, UNIFORM
from xdlm.report.study.page import Section
from xdlm.report.study.verdict import (
    Estimate,
    Finding,
    Outcome,
    Test,
    combination,
    positive,
    under,
    unmeasured,
)
from xdlm.report.tables import markdown_table
from xdlm.report.trade_off import Spot, TradeOff, draw_trade_off, trade_off

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS = 32
_LINE = "#D55E00"
#: Perplexity of text and of generated text.
Place = tuple[Estimate, Estimate]


def balance(study: Study) -> Section:
    found = {judge: one for judge in study.judges if (one := _of(study, judge)) is not None}
    theirs = {
        name: (
            _exact(paper.ZERO_SHOT, name, ZERO_SHOT_MEAN),
            _exact(paper.OWT_QUALITY, name, STEPS),
        )
        for name in paper.METHODS
    }
    read = study.perplexities(ZERO_SHOT_MEAN)
    away = distance(theirs)
    assert away is not None
    finding = Finding(
        f"The trade-off bows inward: {MIXED} writes better ({STEPS} steps) than the straight line from "
        f"{MASKED} to {UNIFORM} at its zero-shot perplexity",
        f"{away.value:.1f} below the line",
        [
            under(judge, bowed({s.name: (read[s.name], _place(s)[1]) for s in one.spots}))
            for judge, one in found.items()
        ],
    )
    parts = (
        [_frontiers(found), _table(study, found, theirs)]
        if found
        else [
            f"Not measured: needs zero-shot perplexity and texts of {STEPS} steps of the same models."
        ]
    )
    figures = {"trade-off": lambda file: _plot(list(found.values()), file)} if found else {}
    return Section(
        "Understanding against generation", ("fig:intro",), parts, [finding], figures,
        [r for r in study.last if r.data == ZERO_SHOT_MEAN or (r.judge and r.steps == STEPS)],
        measure_again(study),
    )  # fmt: skip


def _of(study: Study, judge: str) -> TradeOff | None:
    records = [r for r in study.last if r.judge in (None, judge)]
    try:
        return trade_off(records, data=ZERO_SHOT_MEAN, steps=STEPS)
    except UserError:  # nothing has both; what has not been measured is said on the page
        return None


def _exact(table: paper.PaperTable, row: str, column: str | int) -> Estimate:
    value = table.value(row, column)
    assert value is not None
    return Estimate(value, 0.0)


def _place(spot: Spot) -> Place:
    return Estimate(spot.x, spot.x_error), Estimate(spot.y, spot.y_error)


def distance(places: Mapping[str, Place]) -> Estimate | None:
    """How far below the line through the ends the mixture lies: with w the share of the way from MDLM's to
    UDLM's perplexity, (1 - w) y(MDLM) + w y(UDLM) - y. None if it is not between them."""
    (x0, y0), (x1, y1), (x, y) = (places[name] for name in (MASKED, UNIFORM, MIXED))
    if not min(x0.value, x1.value) < x.value < max(x0.value, x1.value):
        return None
    w = (x.value - x0.value) / (x1.value - x0.value)
    slope = (y1.value - y0.value) / (x1.value - x0.value)
    below = combination([(1 - w, y0), (w, y1), (-1.0, y)])
    # Perplexities of text shift the place on the line; they are of the same rows.
    along = combination([(slope * (1 - w), x0), (slope * w, x1), (-slope, x)])
    return Estimate(below.value, math.hypot(below.stderr, along.stderr))


def bowed(places: Mapping[str, Place]) -> Test:
    absent = [name for name in (MASKED, MIXED, UNIFORM) if name not in places]
    if absent:
        return unmeasured(*absent)
    away = distance(places)
    if away is None:
        words = f"{MIXED}'s zero-shot perplexity is not between those of the two"
        return Test(Outcome.FAILS, words, "not between the two")
    side = f"{'below' if away.value >= 0 else 'above'} the line"
    size = Estimate(abs(away.value), away.stderr)
    return positive(away, f"{size.shown()} {side}", f"{size.plain()} {side}")


def _frontiers(found: Mapping[str, TradeOff]) -> str:
    lines = []
    for judge, one in found.items():
        best = [spot.name for spot in sorted(one.spots, key=lambda s: s.x) if spot.best]
        lines.append(f"Beaten in both by no other under {judge}: {', '.join(best)}.")
    return "  \n".join(["By their values, whatever their errors:", *lines])


def _table(study: Study, found: Mapping[str, TradeOff], theirs: Mapping[str, Place]) -> str:
    spots = {judge: {s.name: s for s in one.spots} for judge, one in found.items()}
    entropy = {name: row[STEPS] for name, row in study.written(None).items() if STEPS in row}
    rows = []
    for name in dict.fromkeys([*paper.METHODS, *(n for own in spots.values() for n in own)]):
        own = [by_name.get(name) for by_name in spots.values()]
        seen = next((spot for spot in own if spot), None)
        row = [name, _place(seen)[0].shown() if seen else ""]
        row += ["" if spot is None else _place(spot)[1].shown() for spot in own]
        row += [entropy[name].shown(3) if name in entropy else ""]
        row += [f"{p.value:.3f}" for p in theirs[name]] if name in theirs else ["", ""]
        rows.append(row)
    judged = [*(f"{STEPS} steps, {judge}" for judge in spots), "their entropy"]
    return markdown_table(
        ["", "zero-shot", *judged, "paper: zero-shot", f"paper: {STEPS} steps"], rows
    )


def _plot(found: list[TradeOff], file: Path) -> None:
    def panel(one: TradeOff) -> Callable[[Axes], None]:
        return lambda axes: _draw(axes, one)

    save_panels(file, [panel(one) for one in found], small=True)


def _draw(axes: Axes, one: TradeOff) -> None:
    ends = [next((s for s in one.spots if s.name == name), None) for name in (MASKED, UNIFORM)]
    if ends[0] is not None and ends[1] is not None:
        x, y = (np.linspace(getattr(ends[0], a), getattr(ends[1], a), 50) for a in "xy")
        axes.plot(x, y, ":", color=_LINE, linewidth=1.2, label=f"from {MASKED} to {UNIFORM}")
    draw_trade_off(axes, one)
