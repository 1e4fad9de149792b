"""Likelihood against quality: which models understand, which write, and which no other one beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from xdlm.errors import UserError
from xdlm.evaluation.perplexity import ZERO_SHOT_MEAN
from xdlm.evaluation.records import EvalRecord
from xdlm.report.comparison import (
    check_generation,
    check_perplexity,
    judge_of,
    labels,
    latest,
    real_text,
)
from xdlm.report.figures import Point, draw_real, legend, lines_of, make_logarithmic
from xdlm.report.plots import clean, save_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

_BEST, _BEATEN = "#0072B2", "#999999"


class Spot(NamedTuple):
    """A place in a figure, with standard errors both ways. `best`: on the frontier."""

    name: str
    x: float
    y: float
    best: bool
    x_error: float = 0.0
    y_error: float = 0.0


@dataclass(frozen=True)
class TradeOff:
    """Perplexity of a text, against that of generated text and against its entropy, a spot per model."""

    text: str
    steps: int
    judge: str
    spots: list[Spot]
    entropies: list[Spot]
    real_entropy: float | None
    left_out: list[str]
    """A line for each model that is not there."""


def trade_off(records: Sequence[EvalRecord], *, data: str, steps: int) -> TradeOff:
    """Every model with both, and those that no other one beats in both."""
    found = latest(records)
    wrote = [r for r in found if r.metric in ("gen_ppl", "entropy") and r.steps == steps]
    read = [r for r in found if r.metric == "ppl" and r.data == data]
    check_perplexity(read)
    check_generation(wrote)
    label = labels(found, steps=True)

    def points(own: Sequence[EvalRecord]) -> dict[str, Point]:
        return {who: one for who, (one,) in lines_of(own, label, lambda r: float(r.step)).items()}

    x, y = points(read), points([r for r in wrote if r.metric == "gen_ppl"])
    entropy = points([r for r in wrote if r.metric == "entropy"])
    both = [name for name in x if name in y]
    if not both:
        raise UserError(f"no model has both a perplexity of {data} and texts of {steps} steps")
    best = {one for one in both if not any(_beats(x, y, other, one) for other in both)}

    def spots(heights: dict[str, Point]) -> list[Spot]:
        return [
            Spot(who, x[who].y, heights[who].y, who in best, x[who].stderr, heights[who].stderr)
            for who in both if who in heights
        ]  # fmt: skip

    needs = {f"perplexity of {data}": x, f"perplexity of texts of {steps} steps": y}
    left_out = [
        f"trade-off: {name} has no finite {what}"
        for name in dict.fromkeys(map(label, found)) for what, has in needs.items()
        if name not in has
    ]  # fmt: skip
    real = real_text(records).get("entropy")
    return TradeOff(
        data, steps, judge_of(wrote), spots(y), spots(entropy), real.value if real else None,
        left_out,
    )  # fmt: skip


def _beats(x: dict[str, Point], y: dict[str, Point], one: str, other: str) -> bool:
    ahead = (x[other].y - x[one].y, y[other].y - y[one].y)
    return min(ahead) >= 0 and max(ahead) > 0


def plot_trade_off(found: TradeOff, file: Path) -> None:
    """Perplexity of generated text and, where it is known, entropy: texts that repeat themselves have a
    low perplexity too."""
    panels = [lambda axes: draw_trade_off(axes, found)]
    if found.entropies:
        panels.append(lambda axes: draw_entropies(axes, found))
    save_panels(file, panels)


def draw_trade_off(axes: Axes, found: TradeOff) -> None:
    frontier = sorted((spot.x, spot.y) for spot in found.spots if spot.best)
    meaning = "frontier: no model beats these in both"
    axes.plot(*zip(*frontier, strict=True), "o--", color=_BEST, linewidth=1, label=meaning)
    beaten = [(spot.x, spot.y) for spot in found.spots if not spot.best]
    if beaten:
        meaning = "beaten in both by another model"
        axes.plot(*zip(*beaten, strict=True), "o", color=_BEATEN, label=meaning)
    axes.set_ylabel(
        f"perplexity of generated text\n({found.judge}),\n{found.steps} steps (lower: writes better)"
    )
    _draw_spots(axes, found.spots, found.text, logarithmic=True)


def draw_entropies(axes: Axes, found: TradeOff) -> None:
    draw_real(axes, found.real_entropy)
    axes.set_ylabel(
        f"entropy of generated text, nats,\n{found.steps} steps (colours as on the left)"
    )
    _draw_spots(axes, found.entropies, found.text, logarithmic=False)


def _draw_spots(axes: Axes, spots: Sequence[Spot], text: str, *, logarithmic: bool) -> None:
    for spot in spots:
        axes.errorbar(
            spot.x, spot.y, xerr=spot.x_error, yerr=spot.y_error, capsize=3, linewidth=1,
            marker="o", color=_BEST if spot.best else _BEATEN,
        )  # fmt: skip
    axes.margins(0.2)
    make_logarithmic(axes, "x")
    if logarithmic:
        make_logarithmic(axes, "y")
    clean(axes)
    what = "mean zero-shot perplexity" if text == ZERO_SHOT_MEAN else f"perplexity of {text}"
    axes.set_xlabel(f"{what} (lower: understands better)")
    legend(axes)
    _name_spots(axes, spots)


def _name_spots(axes: Axes, spots: Sequence[Spot]) -> None:
    """Each name beside its point, at the first side where it hides neither a point nor a name."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # settles where things are
    places = axes.transData.transform([(s.x, s.y) for s in spots])
    taken: list[Bbox] = []
    for spot in spots:
        for x, y, side, edge in _SIDES:
            text = axes.annotate(
                spot.name, (spot.x, spot.y), textcoords="offset points",
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
