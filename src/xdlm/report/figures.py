"""Lines of records, how they are drawn, and the figure of quality against sampling steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Literal, NamedTuple

from xdlm.errors import UserError
from xdlm.evaluation.records import EvalRecord
from xdlm.report.colours import series_colours
from xdlm.report.comparison import check_generation, judge_of, labels, latest, real_text
from xdlm.report.plots import clean, save_panels
from xdlm.report.tables import known_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_REAL = "#777777"


class Point(NamedTuple):
    """A value at a place on the axis, and its standard error (not a number where that is unknown)."""

    x: float
    y: float
    stderr: float


#: Name of a model, or of a setting -> its points in the order of x.
Lines = dict[str, list[Point]]


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
        point = Point(place(record), record.value, known_error(record))
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
    """Below the axes and what is written there, where it hides nothing; in as many columns as fit."""
    names = axes.get_legend_handles_labels()[1]
    if not names:
        return
    columns = min(max(90 // (max(map(len, names)) + 7), 1), 3)
    place = (0.5, -drop)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=place, ncols=columns)


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


def folded(name: str) -> str:
    """In lines that fit beside an axis."""
    return fill(name, 36, break_on_hyphens=False, break_long_words=False)


def draw_real(axes: Axes, level: float | None) -> None:
    if level is not None:
        axes.axhline(level, color=_REAL, linestyle=":", linewidth=1.2, label="real text")


def plot_generation(records: Sequence[EvalRecord], file: Path) -> None:
    """The judge's perplexity against sampling steps on logarithmic axes, and entropy beside it."""
    found = [r for r in latest(records) if r.metric in ("gen_ppl", "entropy")]
    check_generation(found)
    label = labels(found, steps=True)
    colours = series_colours(map(label, found))
    names = {"gen_ppl": f"perplexity ({judge_of(found)})", "entropy": "entropy, nats"}
    real = real_text(records)

    def panel(metric: str) -> Callable[[Axes], None]:
        own = [r for r in found if r.metric == metric]
        lines = lines_of(own, label, lambda r: float(r.steps or 0))
        level = real[metric].value if metric in real else None
        return lambda axes: draw_by_steps(axes, lines, colours, names[metric], level)

    present = {r.metric for r in found}
    save_panels(file, [panel(metric) for metric in names if metric in present])


def draw_by_steps(
    axes: Axes, lines: Lines, colours: dict[str, str], name: str, level: float | None
) -> None:
    draw_lines(axes, lines, colours)
    steps = sorted({point.x for points in lines.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(steps, [f"{n:.0f}" for n in steps])
    axes.minorticks_off()
    draw_real(axes, level)
    if name.startswith("perplexity"):
        make_logarithmic(axes, "y")
    axes.set_xlabel("sampling steps")
    axes.set_ylabel(folded(name))
    legend(axes)
