"""Tables from records: perplexity by text, quality of generated text by number of steps.

Numbers stand in one table only if they can be compared: records that differ in the data behind a column,
the judge, the precision or the sampling settings are refused, and the difference is named.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xdlm.errors import UserError
from xdlm.evaluation.records import EvalRecord

#: What must agree between any two records of a table, beside what its columns say.
_ALWAYS = ("dtype", "weights", "tokenizer_sha256", "length")
_SAMPLING = ("sampler", "temperature", "top_p", "n")
_NAMES = {"masked": "MDLM", "uniform": "UDLM", "mixed": "XDLM", "gidd": "GIDD"}


@dataclass(frozen=True)
class TextTable:
    """Cells as text, with a heading and one line that says what they are."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{body}\n"

    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()


def method_of(record: EvalRecord) -> str:
    """The name of the method in the papers, with its mixing ratio."""
    process = record.config.get("process", {})
    name = _NAMES.get(process.get("kind", ""), process.get("kind", "?"))
    if name != "XDLM":
        return name
    k = process.get("k")
    return f"XDLM k={0.1 if k is None else k:g}"


def labels(records: Sequence[EvalRecord]) -> Callable[[EvalRecord], str]:
    """Names for the models of some records: their methods, where that tells them apart."""
    models: dict[str, set[tuple[str, int]]] = {}
    for record in records:
        models.setdefault(method_of(record), set()).add((record.model, record.step))

    def label(record: EvalRecord) -> str:
        method = method_of(record)
        if len(models[method]) == 1:
            return method
        return f"{method} ({record.model}, step {record.step})"

    return label


def check_alike(records: Sequence[EvalRecord], fields: Sequence[str], what: str) -> None:
    """Refuse to compare what does not compare."""
    for record in records[1:]:
        for name in fields:
            first, other = getattr(records[0], name), getattr(record, name)
            if first != other:
                raise UserError(
                    f"{what}: records differ in {name} ({_short(first)} for {records[0].model}, "
                    f"{_short(other)} for {record.model}); they do not belong in one table"
                )


def perplexity_table(records: Sequence[EvalRecord]) -> TextTable | None:
    """A line per model, a column per text."""
    found = [r for r in records if r.metric == "ppl"]
    if not found:
        return None
    check_alike(found, _ALWAYS, "perplexity")
    texts = list(dict.fromkeys(str(r.data) for r in found))
    for text in texts:
        own = [r for r in found if r.data == text]
        check_alike(own, ("data_sha256", "n"), f"perplexity of {text}")
    label = labels(found)
    cells: dict[str, dict[str, str]] = {}
    for record in found:
        _put(cells.setdefault(label(record), {}), str(record.data), _cell(record), label(record))
    rows = [[model, *(row.get(text, "") for text in texts)] for model, row in cells.items()]
    return TextTable("Perplexity (upper bound)", ["model", *texts], rows)


def generation_table(records: Sequence[EvalRecord]) -> TextTable | None:
    """A line per model, two columns per number of steps: the judge's perplexity, and entropy."""
    found = [r for r in records if r.metric in ("gen_ppl", "entropy")]
    if not found:
        return None
    check_generation(found)
    steps = sorted({int(r.steps or 0) for r in found})
    label = labels(found)
    cells: dict[str, dict[str, str]] = {}
    for record in found:
        place = f"{record.metric} {record.steps}"
        _put(cells.setdefault(label(record), {}), place, _cell(record), label(record))
    columns = [f"{name} {count}" for count in steps for name in ("gen_ppl", "entropy")]
    heads = [
        f"{'perplexity' if name == 'gen_ppl' else name}, {count} steps"
        for count in steps
        for name in ("gen_ppl", "entropy")
    ]
    rows = [[model, *(row.get(column, "") for column in columns)] for model, row in cells.items()]
    judge = next((r.judge for r in found if r.judge), "none")
    return TextTable(f"Generated text, judge: {judge}", ["model", *heads], rows)


def check_generation(records: Sequence[EvalRecord]) -> None:
    check_alike(records, (*_ALWAYS, *_SAMPLING), "generated text")
    judged = [r for r in records if r.metric == "gen_ppl"]
    check_alike(judged, ("judge", "judge_sha256"), "generated text")


def _put(row: dict[str, str], place: str, cell: str, model: str) -> None:
    if row.setdefault(place, cell) != cell:
        raise UserError(f"two different results for {model}, {place}; give one record of each")


def _cell(record: EvalRecord) -> str:
    if record.value is None:
        return "inf"
    error = "" if record.stderr is None else f" ± {record.stderr:.2f}"
    return f"{record.value:.2f}{error}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "..."
