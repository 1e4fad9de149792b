"""What the mixing ratio does: MDLM is k = 0, UDLM is k = 1, and XDLM lies between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from xdlm.errors import UserError
from xdlm.evaluation.records import EvalRecord
from xdlm.report.colours import series_colours
from xdlm.report.comparison import (
    check_alike,
    check_generation,
    check_perplexity,
    judge_of,
    latest,
    ratio,
)
from xdlm.report.figures import Lines, draw_lines, legend, lines_of, make_logarithmic
from xdlm.report.plots import save_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: A sweep of fewer ratios is no curve.
_FEWEST = 3
_NAMED = {0.0: "0\nMDLM", 1.0: "1\nUDLM"}


def sweep(records: Sequence[EvalRecord]) -> dict[str, Lines]:
    """Quantity -> lines against k; nothing where there are fewer than three ratios. Refuses two models
    of one ratio, and models that were trained for different numbers of steps."""
    known = {"ppl", "gen_ppl", "entropy", "mauve"}
    found = [r for r in latest(records) if r.metric in known and ratio(r) is not None]
    models = {r.model: ratio(r) for r in found}
    if len(set(models.values())) < _FEWEST:
        return {}
    for k in sorted(set(map(_ratio, found))):
        same = sorted(model for model, own in models.items() if own == k)
        if len(same) > 1:
            raise UserError(f"there are two models of k = {k:g}, {same[0]} and {same[1]}")
    check_alike(found, ("step",), "k sweep")
    read = [r for r in found if r.metric == "ppl"]
    wrote = [r for r in found if r.metric != "ppl"]
    check_perplexity(read)
    check_generation(wrote)
    panels = {"perplexity of text": lines_of(read, lambda r: str(r.data), _ratio)}
    for metric, title in (
        ("gen_ppl", f"generative perplexity ({judge_of(wrote)})"), ("entropy", "entropy, nats"),
        ("mauve", "MAUVE"),
    ):  # fmt: skip
        own = [r for r in wrote if r.metric == metric]
        panels[title] = lines_of(own, lambda r: f"{r.steps} steps", _ratio)
    return {title: lines for title, lines in panels.items() if lines}


def _ratio(record: EvalRecord) -> float:
    k = ratio(record)
    assert k is not None
    return k


def plot_sweep(panels: dict[str, Lines], file: Path) -> None:
    """A panel per quantity, over an axis that is logarithmic towards both ends."""
    ratios = sorted({p.x for lines in panels.values() for pts in lines.values() for p in pts})

    def panel(title: str, lines: Lines) -> Callable[[Axes], None]:
        return lambda axes: _draw(axes, title, lines, ratios)

    save_panels(file, [panel(title, lines) for title, lines in panels.items()])


def _draw(axes: Axes, title: str, lines: Lines, ratios: Sequence[float]) -> None:
    draw_lines(axes, lines, series_colours(lines))
    axes.set_xscale("function", functions=both_ends(ratios))
    axes.set_xticks(ratios, [_NAMED.get(k, f"{k:g}") for k in ratios])
    axes.minorticks_off()
    if "perplexity" in title:
        make_logarithmic(axes, "y")
    axes.set_xlabel("mixing ratio k")
    axes.set_ylabel(title)
    legend(axes, drop=0.24)


def both_ends(
    ratios: Sequence[float],
) -> tuple[Callable[[NDArray], NDArray], Callable[[NDArray], NDArray]]:
    """k -> log((k + a)/(1 - k + b)) and back, with a and b so that 0 and 1 stand a step from their
    neighbours."""
    inner = [k for k in ratios if 0 < k < 1] or [0.5]
    a, b = min(inner) / 3, (1 - max(inner)) / 3

    def forward(k: NDArray) -> NDArray:
        inside = np.clip(k, 0, 1)
        # Straight beyond both ends, so that margins have somewhere to be.
        return np.log((inside + a) / (1 - inside + b)) + (k - inside) / np.where(k < 0, a, b)

    def back(y: NDArray) -> NDArray:
        low, high = np.log(a / (1 + b)), np.log((1 + a) / b)
        inside = np.clip(y, low, high)
        k = (np.exp(inside) * (1 + b) - a) / (1 + np.exp(inside))
        return k + (y - inside) * np.where(y < low, a, b)

    return forward, back
