"""A table of benchmarks from records: as in the paper, with how the programs of MBPP ended."""

from __future__ import annotations

from collections.abc import Sequence

from xdlm.evaluation.records import EvalRecord
from xdlm.report.comparison import check_alike, labels
from xdlm.report.tables import TextTable, known_error, put_text, with_error

EXACT, PASSED = "exact_match", "pass@"
#: How programs end, in the paper's order.
_ENDS = ("failed", "wrong", "passed")


def is_benchmark(record: EvalRecord) -> bool:
    return record.metric == EXACT or record.metric.startswith(PASSED)


def benchmark_table(records: Sequence[EvalRecord]) -> TextTable | None:
    """A line per model, sampler and number of steps, a column per task, in percent."""
    found = [r for r in records if is_benchmark(r)]
    if not found:
        return None
    check_alike(found, ("dtype", "temperature", "top_p", "length"), "benchmarks")
    for task in dict.fromkeys(r.data for r in found):
        own = [r for r in found if r.data == task]
        check_alike(own, ("data_sha256", "n", "draws"), f"benchmark {task}")
    label = labels(found)
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for record in found:
        line = (label(record), f"{record.step:,}", str(record.sampler), f"{record.steps}")
        row = cells.setdefault(line, {})
        where = f"{line[0]}, {line[3]} steps"
        for place, text in _entries(record):
            put_text(row, place, text, where)
    columns = list(dict.fromkeys(place for row in cells.values() for place in row))
    return TextTable(
        f"Benchmarks, {found[0].length} tokens, percent",
        ["model", "step", "sampler", "sampling steps", *columns],
        [[*line, *(row.get(column, "") for column in columns)] for line, row in cells.items()],
        found,
    )


def _entries(record: EvalRecord) -> list[tuple[str, str]]:
    name = f"{record.data}" if record.metric == EXACT else f"{record.data} {record.metric}"
    value = None if record.value is None else 100 * record.value
    entries = [(f"{name} ({record.n:,})", with_error(value, 100 * known_error(record)))]
    if record.metric == f"{PASSED}1" and set(_ENDS) <= set(record.details):
        ends = " / ".join(f"{record.details[end]:.0f}" for end in _ENDS)
        entries.append((f"{record.data} {' / '.join(_ENDS)}", ends))
    return entries
