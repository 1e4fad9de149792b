"""Tables from records: perplexity by text, quality of generated text by number of steps.

Numbers stand in one table only if they can be compared: records that differ in the data behind a column,
the judge, the precision or the sampling settings are refused, and the difference is named.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xdlm.errors import UserError
from xdlm.evaluation.records import EvalRecord
from xdlm.report.comparison import (
    GENERATED,
    PAINTED,
    REAL,
    check_alike,
    check_generation,
    check_perplexity,
    judge_of,
    labels,
    latest,
    real_records,
    real_text,
)

#: What metrics of real images begin with.
_REAL_IMAGES = "real_"
_NO_ERROR = "± ?: no error from one row and one draw, or from one text."


@dataclass(frozen=True)
class TextTable:
    """Cells as text under a heading, and the records that they are made of."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    records: list[EvalRecord]

    def markdown(self) -> str:
        body = markdown_table(self.columns, self.rows)
        note = f"\n{_NO_ERROR}\n" if any("± ?" in cell for row in self.rows for cell in row) else ""
        return f"## {self.title}\n\n{body}\n{note}"

    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def perplexity_table(records: Sequence[EvalRecord]) -> TextTable | None:
    """A line per model, a column per text."""
    found = [r for r in latest(records) if r.metric == "ppl"]
    if not found:
        return None
    check_perplexity(found)
    texts = list(dict.fromkeys(str(r.data) for r in found))
    label = labels(found)
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for record in found:
        line = (label(record), f"{record.step:,}")
        put(cells.setdefault(line, {}), str(record.data), record, label(record))
    rows = [[*line, *(row.get(text, "") for text in texts)] for line, row in cells.items()]
    return TextTable("Perplexity (upper bound)", ["model", "step", *texts], rows, found)


def generation_table(records: Sequence[EvalRecord]) -> TextTable | None:
    """A line per model and number of sampling steps, and real text below."""
    found = [r for r in latest(records) if r.metric in GENERATED]
    if not found:
        return None
    check_generation(found)
    label = labels(found)
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for record in sorted(found, key=lambda r: (_first(found, r.model), r.steps)):
        line = (label(record), f"{record.step:,}", f"{record.steps}")
        put(cells.setdefault(line, {}), record.metric, record, f"{line[0]}, {line[2]} steps")
    for kind, name in REAL.items():
        beside = real_text(records, kind)
        for metric, record in beside.items():
            line = (f"{name} ({record.data})", "", "")
            put(cells.setdefault(line, {}), metric, record, name)
    present = {metric for row in cells.values() for metric in row}
    metrics = {name: title for name, title in GENERATED.items() if name in present}
    return TextTable(
        f"Generated text, judge: {judge_of(found)}",
        ["model", "step", "sampling steps", *metrics.values()],
        [[*line, *(row.get(name, "") for name in metrics)] for line, row in cells.items()],
        [*found, *real_records(records)],
    )


def image_table(records: Sequence[EvalRecord]) -> TextTable | None:
    """A line per model, scale of guidance and number of sampling steps, and real images below."""
    found = [r for r in records if r.metric.removeprefix(_REAL_IMAGES) in PAINTED]
    if not found:
        return None
    check_alike(found, ("data_sha256", "judge_sha256"), "images")
    painted = [r for r in found if r.metric in PAINTED]
    check_alike(painted, ("dtype", "weights", "n", "temperature", "top_p"), "images")
    label = labels(painted, steps=True)
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for record in found:
        settings = (f"{record.guidance:g}", f"{record.steps}") if record in painted else ("", "")
        line = (label(record) if record in painted else record.model, *settings)
        metric = record.metric.removeprefix(_REAL_IMAGES)
        put(cells.setdefault(line, {}), metric, record, f"{line[0]}, {line[2]} steps")
    present = {metric for row in cells.values() for metric in row}
    metrics = {name: title for name, title in PAINTED.items() if name in present}
    return TextTable(
        f"Images, against {found[0].data}",
        ["model", "guidance", "sampling steps", *metrics.values()],
        [[*line, *(row.get(name, "") for name in metrics)] for line, row in cells.items()], found,
    )  # fmt: skip


def _first(records: Sequence[EvalRecord], model: str) -> int:
    """The place of a model's first record: models keep their order."""
    return next(i for i, record in enumerate(records) if record.model == model)


def unshown(records: Sequence[EvalRecord], tables: Iterable[TextTable]) -> list[str]:
    """Lines that say what is in no table, or in tables alone, and why."""
    shown = {id(record) for table in tables for record in table.records}
    metrics: dict[tuple[str, str], dict[str, None]] = {}
    for record in records:
        if reason := _reason(record, shown=id(record) in shown):
            metrics.setdefault((reason, record.model), {})[record.metric] = None
    models: dict[tuple[str, str], list[str]] = {}
    for (reason, model), names in metrics.items():
        models.setdefault((reason, ", ".join(names)), []).append(model)
    return [f"{reason}: {names} of {', '.join(own)}" for (reason, names), own in models.items()]


def _reason(record: EvalRecord, *, shown: bool) -> str | None:
    if shown:
        return "without a finite value, so in no figure" if record.value is None else None
    if record.metric in ("ppl", *GENERATED):
        return "not shown, measured before the model's last step"
    if record.metric.startswith(tuple(REAL)):
        return "not shown, no texts were generated and judged alike"
    return "not shown, there is no table for it"


def put(row: dict[str, str], place: str, record: EvalRecord, where: str) -> None:
    put_text(row, place, _cell(record), where)


def put_text(row: dict[str, str], place: str, cell: str, where: str) -> None:
    """Fill a cell, once."""
    if row.setdefault(place, cell) != cell:
        raise UserError(f"two different results for {where}, {place}; give one record of each")


def _cell(record: EvalRecord) -> str:
    if record.metric.endswith("ppl"):
        return with_error(record.value, known_error(record))
    if record.value is None:
        return "none"
    has_error = record.metric.endswith(("entropy", "fid", "kid", "inception_score"))
    digits = 5 if record.metric.endswith("kid") else 3
    return with_error(record.value, known_error(record) if has_error else None, digits)


def known_error(record: EvalRecord) -> float:
    """The standard error, not a number where it is not known."""
    return math.nan if record.stderr is None else record.stderr


def with_error(value: float | None, stderr: float | None, digits: int = 2) -> str:
    """As text. What has no error by its nature has None, one that is not known is not a number."""
    if value is None:
        return "inf"
    error = "" if stderr is None else f" ± {stderr:.{digits}f}"
    return f"{value:.{digits}f}" + error.replace("nan", "?")
