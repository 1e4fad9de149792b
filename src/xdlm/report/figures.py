"""Figures from records: quality against steps, and likelihood against quality."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xdlm.errors import UserError
from xdlm.evaluation.records import EvalRecord
from xdlm.report.plots import save_panels
from xdlm.report.tables import check_alike, check_generation, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_generation(records: Sequence[EvalRecord], file: Path) -> None:
    """The judge's perplexity against sampling steps on logarithmic axes, and entropy beside it."""
    found = [r for r in records if r.metric in ("gen_ppl", "entropy")]
    check_generation(found)
    judge = next((r.judge for r in found if r.judge), "")
    save_panels(
        file,
        [
            lambda axes: _draw_by_steps(axes, found, "gen_ppl", f"perplexity ({judge})", log=True),
            lambda axes: _draw_by_steps(axes, found, "entropy", "entropy, nats", log=False),
        ],
    )


def plot_trade_off(records: Sequence[EvalRecord], file: Path, *, data: str, steps: int) -> None:
    """Perplexity of a text against that of generated text, a point per model, and the frontier: the
    models that no other one beats in both."""
    points = trade_off(records, data=data, steps=steps)
    save_panels(file, [lambda axes: _draw_trade_off(axes, points, data, steps)])


def trade_off(
    records: Sequence[EvalRecord], *, data: str, steps: int
) -> list[tuple[str, float, float, bool]]:
    """(model, perplexity of the text, of generated text, on the frontier) for every model with both."""
    understanding = [r for r in records if r.metric == "ppl" and r.data == data]
    generation = [r for r in records if r.metric == "gen_ppl" and r.steps == steps]
    check_alike(understanding, ("data_sha256", "dtype", "weights"), f"perplexity of {data}")
    check_generation(generation)
    label = labels([*understanding, *generation])
    x = {label(r): r.value for r in understanding if r.value is not None}
    y = {label(r): r.value for r in generation if r.value is not None}
    both = [name for name in x if name in y]
    if not both:
        raise UserError(f"no model has both a perplexity of {data} and texts of {steps} steps")
    return [
        (name, x[name], y[name], not any(_beats(x, y, other, name) for other in both))
        for name in both
    ]


def _beats(x: dict[str, float], y: dict[str, float], one: str, other: str) -> bool:
    no_worse = x[one] <= x[other] and y[one] <= y[other]
    return no_worse and (x[one] < x[other] or y[one] < y[other])


def _draw_by_steps(
    axes: Axes, records: Sequence[EvalRecord], metric: str, name: str, *, log: bool
) -> None:
    label = labels(records)
    own = [r for r in records if r.metric == metric and r.value is not None]
    for model in dict.fromkeys(map(label, own)):
        line = sorted((r.steps or 0, r.value, r.stderr or 0.0) for r in own if label(r) == model)
        steps, values, errors = zip(*line, strict=True)
        axes.errorbar(steps, values, yerr=errors, marker="o", capsize=3, label=model)
    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("sampling steps")
    axes.set_ylabel(name)
    axes.legend(frameon=False)


def _draw_trade_off(
    axes: Axes, points: Sequence[tuple[str, float, float, bool]], data: str, steps: int
) -> None:
    for name, x, y, best in points:
        axes.plot([x], [y], "o", color="#1F4E79" if best else "#999999")
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, 5))
    frontier = sorted((x, y) for _, x, y, best in points if best)
    axes.plot(*zip(*frontier, strict=True), linestyle="--", color="#1F4E79", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"perplexity of {data}")
    axes.set_ylabel(f"perplexity of generated text, {steps} steps")
