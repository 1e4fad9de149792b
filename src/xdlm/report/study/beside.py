"""What lies beside the records of a study: how losses went, and texts to read.

curves/RUN.csv                 step,nats: the bound on training batches
samples/RUN/steps-00008.jsonl  texts of so many sampling steps, as `xdlm eval gen --samples` keeps them
again/                         all of this of some of the methods, trained again with another seed
gumbel/                        the same, whose texts were drawn exactly and by float32 Gumbel noise
adapted/                       a masked model that was trained and adapted again
otherwise/NAME/                the same study under another recipe
law/                           records of texts of known laws, without any model
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xdlm.errors import UserError
from xdlm.files import write_atomic
from xdlm.report.colours import series_colours
from xdlm.report.figures import Lines, Point, legend
from xdlm.report.plots import clean, save_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SECONDS, CURVES, SAMPLES = "seconds.csv", "curves", "samples"
#: Folders of what is apart from the first training.
AGAIN, ADAPTED, GUMBEL, LAW, OTHERWISE = "again", "adapted", "gumbel", "law", "otherwise"
#: Run -> (step, nats), and run -> number of sampling steps -> texts.
Curves = dict[str, list[tuple[int, float]]]
Samples = dict[str, dict[int, list[str]]]

_COLUMNS = ["step", "nats"]
#: Points of a long curve that are drawn as one, so that it can be read, and what is not long.
_SMOOTH, _FEW = 5, 50


def write_curve(log: Path, file: Path) -> None:
    """The curve of a run from its log."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    rows = [f"{one['step']},{one['elbo']:.4f}\n" for one in lines if "elbo" in one]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, ",".join(_COLUMNS) + "\n" + "".join(rows))


def read_curves(folder: Path) -> Curves:
    found: Curves = {}
    for file in sorted((folder / CURVES).glob("*.csv")):
        try:
            head, *rows = csv.reader(file.read_text(encoding="utf-8").splitlines())
            if head != _COLUMNS:
                raise ValueError(f"its columns are {head}")
            found[file.stem] = [(int(step), float(nats)) for step, nats in rows]
        except ValueError as error:
            raise UserError(f"{file} is no curve of {','.join(_COLUMNS)}: {error}") from error
    return found


def add_seconds(file: Path, command: str, seconds: float) -> None:
    """A line, in one piece: several commands end at a time."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"{command},{seconds:.0f}\n")


def read_seconds(folder: Path) -> dict[str, float]:
    """What each command took, in all where it was called several times, here and in the folders below, but
    for those of other trainings."""
    found: dict[str, float] = {}
    for file in sorted(f for f in folder.rglob(SECONDS) if not is_apart(f, folder)):
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                command, seconds = line.split(",")
                found[command] = found.get(command, 0.0) + float(seconds)
            except ValueError as error:
                raise UserError(f"{file} is no list of command,seconds: '{line}'") from error
    return found


def is_apart(file: Path, folder: Path) -> bool:
    """Whether a file in a folder of results belongs to another training, or to none."""
    return file.relative_to(folder).parts[0] in (AGAIN, ADAPTED, GUMBEL, LAW, OTHERWISE)


def read_samples(folder: Path) -> Samples:
    found: Samples = {}
    for file in sorted((folder / SAMPLES).glob("*/steps-*.jsonl")):
        lines = file.read_text(encoding="utf-8").splitlines()
        try:
            texts = [str(json.loads(line)["text"]) for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} holds something else than texts: {error!r}") from error
        found.setdefault(file.parent.name, {})[int(file.stem.removeprefix("steps-"))] = texts
    return found


def plot_curves(curves: Mapping[str, Sequence[tuple[int, float]]], file: Path) -> None:
    """Nats per token against the training step, a line for each name."""
    mean = 1 if max(map(len, curves.values())) <= _FEW else _SMOOTH
    lines: Lines = {name: _smoothed(curve, mean) for name, curve in curves.items()}
    colours = series_colours(list(lines))
    ground = f" (means of {mean} logged batches)" if mean > 1 else ""

    def draw(axes: Axes) -> None:
        for name, points in lines.items():
            axes.plot(
                [p.x for p in points], [p.y for p in points], label=name, color=colours[name],
                linewidth=1.3,
            )  # fmt: skip
        axes.set(
            xlabel="training step" + ground, ylabel="bound on training batches, nats per token"
        )
        clean(axes)
        legend(axes)

    save_panels(file, [draw])


def _smoothed(curve: Sequence[tuple[int, float]], mean: int) -> list[Point]:
    parts = [curve[i : i + mean] for i in range(0, len(curve), mean)]
    return [
        Point(
            sum(step for step, _ in part) / len(part),
            sum(nats for _, nats in part) / len(part),
            float("nan"),
        )
        for part in parts
    ]
