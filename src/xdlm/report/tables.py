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
#: What is shown of generated text, and under which heading.
_GENERATED = {"gen_ppl": "perplexity", "entropy": "entropy", "mauve": "MAUVE"}
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


def labels(records: Sequence[EvalRecord], *, by_step: bool = True) -> Callable[[EvalRecord], str]:
    """Names for the models of some records: their methods, where that tells them apart. A model at two
    training steps is two models, unless `by_step` says otherwise."""
    models: dict[str, set[tuple[str, int]]] = {}
    for record in records:
        one = (record.model, record.step if by_step else 0)
        models.setdefault(method_of(record), set()).add(one)

    def label(record: EvalRecord) -> str:
        method = method_of(record)
        if len(models[method]) == 1:
            return method
        step = f", step {record.step}" if by_step else ""
        return f"{method} ({record.model}{step})"

    return label


def latest(records: Sequence[EvalRecord]) -> list[EvalRecord]:
    """Of each model the records of its last training step; what came before is for dynamics to show."""
    last: dict[str, int] = {}
    for record in records:
        last[record.model] = max(record.step, last.get(record.model, 0))
    return [record for record in records if record.step == last[record.model]]


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
    found = latest([r for r in records if r.metric == "ppl"])
    if not found:
        return None
    check_perplexity(found)
    texts = list(dict.fromkeys(str(r.data) for r in found))
    label = labels(found)
    cells: dict[str, dict[str, str]] = {}
    for record in found:
        _put(cells.setdefault(label(record), {}), str(record.data), _cell(record), label(record))
    rows = [[model, *(row.get(text, "") for text in texts)] for model, row in cells.items()]
    return TextTable("Perplexity (upper bound)", ["model", *texts], rows)


def generation_table(records: Sequence[EvalRecord]) -> TextTable | None:
    """A line per model; per number of steps the judge's perplexity, entropy, and MAUVE if there is one."""
    found = latest([r for r in records if r.metric in _GENERATED])
    if not found:
        return None
    check_generation(found)
    present = {r.metric for r in found}
    metrics = {name: title for name, title in _GENERATED.items() if name in present}
    steps = sorted({int(r.steps or 0) for r in found})
    label = labels(found)
    cells: dict[str, dict[str, str]] = {}
    for record in found:
        place = f"{record.metric} {record.steps}"
        _put(cells.setdefault(label(record), {}), place, _cell(record), label(record))
    columns = [f"{name} {count}" for count in steps for name in metrics]
    heads = [f"{title}, {count} steps" for count in steps for title in metrics.values()]
    rows = [[model, *(row.get(column, "") for column in columns)] for model, row in cells.items()]
    judge = next((r.judge for r in found if r.judge), "none")
    real = real_text(records)
    beside = "" if real is None else f"; real text ({real.data}): {_cell(real)}"
    return TextTable(f"Generated text, judge: {judge}{beside}", ["model", *heads], rows)


def real_text(records: Sequence[EvalRecord]) -> EvalRecord | None:
    """What the judge of the generated texts says of real text, if that was recorded."""
    judges = {r.judge_sha256 for r in records if r.metric == "gen_ppl"}
    found = [r for r in records if r.metric == "real_ppl" and r.judge_sha256 in judges]
    check_alike(found, ("judge_sha256", "data_sha256", "length", "n"), "real text")
    return found[0] if found else None


def check_perplexity(records: Sequence[EvalRecord]) -> None:
    check_alike(records, _ALWAYS, "perplexity")
    for text in dict.fromkeys(r.data for r in records):
        own = [r for r in records if r.data == text]
        check_alike(own, ("data_sha256", "n"), f"perplexity of {text}")


def check_generation(records: Sequence[EvalRecord]) -> None:
    check_alike(records, (*_ALWAYS, *_SAMPLING), "generated text")
    judged = [r for r in records if r.judge is not None]
    check_alike(judged, ("judge", "judge_sha256"), "generated text")
    compared = [r for r in records if r.metric == "mauve"]
    check_alike(compared, ("data_sha256",), "MAUVE")


def _put(row: dict[str, str], place: str, cell: str, model: str) -> None:
    if row.setdefault(place, cell) != cell:
        raise UserError(f"two different results for {model}, {place}; give one record of each")


def _cell(record: EvalRecord) -> str:
    return cell(record.value, record.stderr, 3 if record.metric in ("entropy", "mauve") else 2)


def cell(value: float | None, stderr: float | None, digits: int) -> str:
    if value is None:
        return "inf"
    return f"{value:.{digits}f}" + ("" if stderr is None else f" ± {stderr:.{digits}f}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "..."
