"""Figures as PNG files: what a sampler did, and how a training run went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xdlm.errors import UserError
from xdlm.files import write_atomic
from xdlm.report.colours import LOOKS, MASK
from xdlm.sampling import Trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from xdlm.evaluation.speed import Speed

Records = Sequence[dict[str, Any]]

_DPI, _SMALL_DPI = 130, 96
_PANEL_INCHES = (6.4, 4.0)
_COLUMNS = 3
_INK, _FAINT = "#333333", "#D9D9D9"
_LOSS, _VALIDATION, _REFERENCE = "#1F4E79", "#D9822B", "#777777"


def plot_transitions(trajectory: Trajectory, file: Path) -> None:
    """How many positions each step changed, by kind, and how many masks it left."""
    save_panels(file, [lambda axes: _draw_transitions(axes, trajectory)])


def plot_loss(
    records: Records, file: Path, *, reference: float | None = None, reference_name: str = ""
) -> None:
    """Training loss, validation points if the log has any, and a level to compare with."""
    save_panels(file, [lambda axes: _draw_loss(axes, records, reference, reference_name)])


def plot_overview(
    trajectory: Trajectory,
    records: Records,
    file: Path,
    *,
    reference: float | None = None,
    reference_name: str = "",
) -> None:
    """Both of the above, side by side."""
    save_panels(
        file,
        [
            lambda axes: _draw_transitions(axes, trajectory),
            lambda axes: _draw_loss(axes, records, reference, reference_name),
        ],
    )


def plot_speed(cells: Sequence[Speed], file: Path, *, title: str) -> None:
    """Tokens per second of each method and task, ours beside plain."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))

    def panel(task: str) -> Callable[[Axes], None]:
        return lambda axes: _draw_speed(axes, [c for c in cells if c.task == task], title)

    save_panels(file, [panel(task) for task in tasks], columns=2)


def plot_scan(points: Sequence[tuple[int, Speed]], file: Path, *, title: str, axis: str) -> None:
    """Seconds per run, and peak memory where it was measured, against the size of one thing."""
    panels = [lambda axes: _draw_scan(axes, points, title, axis, "seconds")]
    if any(cell.peak_gb is not None for _, cell in points):
        panels.append(lambda axes: _draw_scan(axes, points, title, axis, "peak_gb"))
    save_panels(file, panels)


def save_panels(
    file: Path,
    panels: Sequence[Callable[[Axes], None]],
    columns: int = _COLUMNS,
    *,
    small: bool = False,
) -> None:
    """Draw panels, so many in a row, and write them at once: as SVG if the file's name says so, or PNG.
    The same picture has the same bytes: they hold neither dates nor versions. A `small` one has fewer
    pixels and colours, to be kept beside code.

    A `Figure` of its own instead of pyplot: no display, no global state, nothing to close.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install 'xdlm[log]'") from error

    width, height = _PANEL_INCHES
    columns = min(len(panels), columns)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for place, draw in enumerate(panels, start=1):
        draw(figure.add_subplot(lines, columns, place))
    image = BytesIO()
    if file.suffix == ".svg":
        with rc_context({"svg.hashsalt": "xdlm"}):
            figure.savefig(image, format="svg", metadata={"Date": None})
    else:
        dpi = _SMALL_DPI if small else _DPI
        figure.savefig(image, format="png", dpi=dpi, metadata={"Software": None})
        image = _few_colours(image) if small else image
    write_atomic(file, image.getvalue())


def _few_colours(image: BytesIO) -> BytesIO:
    """A picture of at most 64 colours: lines and letters on white need no more."""
    from PIL import Image

    small = BytesIO()
    with Image.open(image) as picture:
        few = picture.convert("RGB").quantize(64, dither=Image.Dither.NONE)
        few.save(small, format="png", optimize=True)
    return small


def _draw_transitions(axes: Axes, trajectory: Trajectory) -> None:
    clean(axes)
    steps = np.arange(1, trajectory.steps + 1)
    base = np.zeros(trajectory.steps)
    counts = trajectory.counts()
    for kind, look in LOOKS.items():
        axes.bar(
            steps, counts[kind], width=0.85, bottom=base, color=look.colour,
            label=f"{look.name} ({look.meaning})",
        )  # fmt: skip
        base += counts[kind]
    # Counts are small next to the number of masks, so masks have an axis of their own.
    masks = axes.twinx()
    masks.plot(
        np.arange(trajectory.steps + 1), _masks_left(trajectory), color=MASK.colour, linewidth=1.6,
        label="masks left (right axis)",
    )  # fmt: skip
    masks.set_ylabel("masks left", color=MASK.colour)
    masks.tick_params(colors=MASK.colour, length=0)
    masks.spines[:].set_visible(False)
    # Room above the tallest bar, so that the legend hides nothing.
    axes.set_ylim(0, 1.45 * max(1.0, float(base.max(initial=0))))
    masks.set_ylim(0, 1.45 * max(1, *_masks_left(trajectory)))
    axes.set_xlim(-0.5, trajectory.steps + 0.5)
    axes.set_xlabel("sampling step")
    axes.set_ylabel("positions changed")
    n = trajectory.frames.shape[1]
    axes.set_title(f"What each step did ({n} sample{'s' if n > 1 else ''})", color=_INK)
    handles, labels = axes.get_legend_handles_labels()
    more_handles, more_labels = masks.get_legend_handles_labels()
    masks.legend(
        handles + more_handles, labels + more_labels, loc="upper center", ncols=2, fontsize=8,
        frameon=False,
    )  # fmt: skip


def _draw_loss(axes: Axes, records: Records, reference: float | None, name: str) -> None:
    points = [(r["step"], r["loss"]) for r in records if "loss" in r]
    if not points:
        raise UserError("there is no loss to plot: the log has no record with one")
    clean(axes)
    steps, losses = np.array(points, dtype=float).T
    axes.plot(steps, losses, color=_LOSS, alpha=0.25, linewidth=1.0, label="training loss")
    axes.plot(steps, _smooth(losses), color=_LOSS, linewidth=1.8, label="smoothed")
    validation = [
        (r["step"], r["val_nats"], r.get("val_stderr", 0)) for r in records if "val_nats" in r
    ]
    if validation:
        at, nats, stderr = np.array(validation, dtype=float).T
        axes.errorbar(
            at, nats, yerr=stderr, color=_VALIDATION, marker="o", markersize=4, linewidth=1.2,
            capsize=2, label="validation (± standard error)",
        )  # fmt: skip
    if reference is not None:
        axes.axhline(
            reference, color=_REFERENCE, linestyle="--", linewidth=1.2,
            label=f"{name or 'reference'}: {reference:.2f}",
        )  # fmt: skip
    axes.set_xlabel("training step")
    axes.set_ylabel("nats per token")
    axes.set_title("Loss", color=_INK)
    axes.legend(fontsize=8, frameon=False)


def _draw_speed(axes: Axes, cells: Sequence[Speed], title: str) -> None:
    methods = list(dict.fromkeys(cell.method for cell in cells))
    colours = {"ours": _LOSS, "plain": _REFERENCE}
    shown = list(dict.fromkeys(cell.impl for cell in cells))
    for i, impl in enumerate(shown):
        chosen = [cell for cell in cells if cell.impl == impl]
        offset = 0.4 * (i - (len(shown) - 1) / 2)
        places = [methods.index(cell.method) + offset for cell in chosen]
        speeds = [cell.tokens_per_s for cell in chosen]
        bars = axes.bar(places, speeds, width=0.38, color=colours[impl], label=impl)
        axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], fontsize=8, padding=2)
    axes.margins(y=0.1)
    axes.set_xticks(range(len(methods)), methods)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{cells[0].task} ({title})")
    # Above the bars there is no room that would be free for sure.
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    clean(axes)


def _draw_scan(
    axes: Axes, points: Sequence[tuple[int, Speed]], title: str, axis: str, what: str
) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for size, cell in points:
        name = f"{cell.method} {cell.task} ({cell.impl})"
        lines.setdefault(name, []).append((size, getattr(cell, what)))
    for name, line in lines.items():
        axes.plot(*zip(*line, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(axis)
    axes.set_ylabel({"seconds": "seconds per run", "peak_gb": "peak memory, GB"}[what])
    axes.set_title(title)
    axes.legend(fontsize=7)
    clean(axes)


def clean(axes: Axes) -> None:
    """Keep what carries information: two thin axes and a faint horizontal grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.grid(axis="y", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)


def _masks_left(trajectory: Trajectory) -> list[int]:
    frames = trajectory.frames.flatten(1)
    return [sum(int((frame == i).sum()) for i in trajectory.special_ids) for frame in frames]


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running mean over about a twentieth of the curve.

    At the start, where the curve is steep, the window shrinks and stays centred, so as not to bend
    it; at the end it is cut instead, since a window shrinking to one value would end in noise.
    """
    index = np.arange(len(values))
    reach = len(values) // 40 + 1
    first = index - np.minimum(index, reach)
    last = np.minimum(index + np.minimum(index, reach), len(values) - 1)
    total = np.concatenate([[0.0], np.cumsum(values)])
    return (total[last + 1] - total[first]) / (last + 1 - first)
