"""Figures from records: quality against steps, and likelihood against quality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from xdlm.errors import UserError
from xdlm.evaluation.records import EvalRecord
from xdlm.report.colours import series_colours
from xdlm.report.plots import clean, save_panels
from xdlm.report.tables import check_generation, check_perplexity, labels, latest, real_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.transforms import Bbox

_BEST, _BEATEN, _REAL = "#0072B2", "#999999", "#777777"


class Point(NamedTuple):
    """A value at a place on the axis, and its standard error (0 where it has none)."""

    x: float
    y: float
    stderr: float


#: Name of a model, or of a setting -> its points in the order of x.
Lines = dict[str, list[Point]]


class Spot(NamedTuple):
    """A model between understanding and generation."""

    name: str
    understanding: float
    generation: float
    best: bool


def lines_of(
    records: Sequence[EvalRecord],
    name: Callable[[EvalRecord], str],
    place: Callable[[EvalRecord], float],
) -> Lines:
    """Points by name. What is beyond all numbers is left out, and what was measured twice must agree."""
    found: dict[str, dict[float, Point]] = {}
    for record in records:
        if record.value is None:
            continue
        point = Point(place(record), record.value, record.stderr or 0.0)
        own = found.setdefault(name(record), {})
        if own.setdefault(point.x, point) != point:
            raise UserError(
                f"two different results ({record.metric}) for {name(record)} at {point.x:g}; "
                "give one record of each"
            )
    return {who: sorted(points.values()) for who, points in found.items()}


def draw_lines(axes: Axes, lines: Lines, colours: dict[str, str]) -> None:
    for name, points in lines.items():
        x, y, errors = zip(*points, strict=True)
        axes.errorbar(
            x, y, yerr=errors, marker="o", markersize=4, capsize=3, linewidth=1.4, label=name,
            color=colours[name],
        )  # fmt: skip
    clean(axes)


def legend(axes: Axes, drop: float = 0.16) -> None:
    """Below the axes and what is written there, where it hides nothing."""
    place = (0.5, -drop)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=place, ncols=3)


def make_logarithmic(axes: Axes, which: Literal["x", "y"]) -> None:
    """With ticks as plain numbers, and a few of them however short the axis is."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis: Axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    low, high = sorted(axis.get_view_interval())
    short = high < 8 * low
    axis.set_major_locator(MaxNLocator(5) if short else LogLocator(subs=(1, 2, 5), numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def plot_generation(records: Sequence[EvalRecord], file: Path) -> None:
    """The judge's perplexity against sampling steps on logarithmic axes, and entropy beside it."""
    found = latest([r for r in records if r.metric in ("gen_ppl", "entropy")])
    check_generation(found)
    label = labels(found)
    colours = series_colours(map(label, found))
    judge = next((r.judge for r in found if r.judge), "")
    real = real_text(records)

    def panel(metric: str, name: str) -> Callable[[Axes], None]:
        own = [r for r in found if r.metric == metric]
        lines = lines_of(own, label, lambda r: float(r.steps or 0))
        level = real.value if real is not None and metric == "gen_ppl" else None
        return lambda axes: _draw_by_steps(axes, lines, colours, name, level)

    save_panels(
        file, [panel("gen_ppl", f"perplexity ({judge})"), panel("entropy", "entropy, nats")]
    )


def plot_trade_off(spots: Sequence[Spot], file: Path, *, data: str, steps: int) -> None:
    """Perplexity of a text against that of generated text, a point per model, and the frontier: the
    models that no other one beats in both."""
    save_panels(file, [lambda axes: draw_trade_off(axes, spots, data, steps)])


def trade_off(records: Sequence[EvalRecord], *, data: str, steps: int) -> list[Spot]:
    """Every model with both."""
    understanding = latest([r for r in records if r.metric == "ppl" and r.data == data])
    generation = latest([r for r in records if r.metric == "gen_ppl" and r.steps == steps])
    check_perplexity(understanding)
    check_generation(generation)
    label = labels([*understanding, *generation])
    x = {label(r): r.value for r in understanding if r.value is not None}
    y = {label(r): r.value for r in generation if r.value is not None}
    both = [name for name in x if name in y]
    if not both:
        raise UserError(f"no model has both a perplexity of {data} and texts of {steps} steps")
    return [
        Spot(name, x[name], y[name], not any(_beats(x, y, other, name) for other in both))
        for name in both
    ]


def _beats(x: dict[str, float], y: dict[str, float], one: str, other: str) -> bool:
    no_worse = x[one] <= x[other] and y[one] <= y[other]
    return no_worse and (x[one] < x[other] or y[one] < y[other])


def _draw_by_steps(
    axes: Axes, lines: Lines, colours: dict[str, str], name: str, level: float | None
) -> None:
    draw_lines(axes, lines, colours)
    steps = sorted({point.x for points in lines.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, [f"{n:.0f}" for n in steps])
    axes.minorticks_off()
    if level is not None:
        axes.axhline(level, color=_REAL, linestyle="--", linewidth=1, label="real text")
    if name.startswith("perplexity"):
        make_logarithmic(axes, "y")
    axes.set_xlabel("sampling steps")
    axes.set_ylabel(name)
    legend(axes)


def draw_trade_off(axes: Axes, spots: Sequence[Spot], data: str, steps: int) -> None:
    for spot in spots:
        axes.plot(
            [spot.understanding], [spot.generation], "o", color=_BEST if spot.best else _BEATEN
        )
    frontier = sorted((spot.understanding, spot.generation) for spot in spots if spot.best)
    axes.plot(*zip(*frontier, strict=True), linestyle="--", color=_BEST, linewidth=1)
    axes.margins(0.2)
    make_logarithmic(axes, "x")
    make_logarithmic(axes, "y")
    clean(axes)
    axes.set_xlabel(f"perplexity of {data} (lower: understands better)")
    axes.set_ylabel(f"perplexity of generated text, {steps} steps\n(lower: writes better)")
    _name_spots(axes, spots)


def _name_spots(axes: Axes, spots: Sequence[Spot]) -> None:
    """Each name beside its point, at the first side where it hides neither a point nor a name."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # settles where things are
    places = axes.transData.transform([(s.understanding, s.generation) for s in spots])
    taken: list[Bbox] = []
    for spot in spots:
        for x, y, side, edge in _SIDES:
            text = axes.annotate(
                spot.name, (spot.understanding, spot.generation), textcoords="offset points",
                xytext=(x, y), ha=side, va=edge, fontsize=8,
            )  # fmt: skip
            box = text.get_window_extent()
            free = not any(box.overlaps(other) for other in taken)
            inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1
            if free and inside and not any(box.padded(4).contains(*place) for place in places):
                break
            if (x, y, side, edge) != _SIDES[-1]:
                text.remove()
        taken.append(box)


#: Where a name may stand, as an offset in points and the side of the text that is held there.
_SIDES = [
    (dx * far, dy * far, ("center", "left", "right")[dx], ("center", "bottom", "top")[dy])
    for far in (6, 12, 20, 30)
    for dx, dy in ((1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1), (0, -1))
]  # fmt: skip
