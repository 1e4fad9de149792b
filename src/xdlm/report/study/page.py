"""Sections of the page, and how they become Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xdlm.evaluation.records import EvalRecord
from xdlm.report.study.paper import PaperTable
from xdlm.report.study.verdict import Estimate, Finding
from xdlm.report.tables import markdown_table

Plot = Callable[[Path], None]


@dataclass(frozen=True)
class Section:
    """A part of the page. `figures` are drawn to files of these names."""

    title: str
    labels: tuple[str, ...] = ()
    """What it stands beside in the paper."""
    parts: Sequence[str] = ()
    """Paragraphs and tables; empty ones are left out."""
    findings: Sequence[Finding] = ()
    figures: Mapping[str, Plot] = field(default_factory=dict)
    records: Sequence[EvalRecord] = ()
    """What it is made of."""
    command: str = ""
    pictures: Mapping[str, str] = field(default_factory=dict)
    """Files that are there already, by their places among the results, and what they show."""
    aside: bool = False
    """Whether its findings are about something else than what was trained."""

    @property
    def heading(self) -> str:
        beside = ", ".join(f"`{label}`" for label in self.labels)
        return self.title + (f" (paper: {beside})" if beside else "")

    @property
    def link(self) -> str:
        """To its heading, as pages on the web name it: letters, digits, hyphens and underscores."""
        plain = re.sub(r"[^\w\- ]", "", self.heading.lower())
        return f"[{self.title}](#{plain.replace(' ', '-')})"

    def markdown(self, results: str, sources: Sequence[EvalRecord] = ()) -> str:
        """With figures found in the folder of results, and what was measured with, by the `sources` of its
        records."""
        blocks = [f"## {self.heading}"]
        if self.findings:
            blocks.append("\n".join(f"- {finding.sentence}" for finding in self.findings))
        blocks += [f"![{name}]({results}/figures/{name}.png)" for name in self.figures]
        blocks += filter(None, self.parts)
        blocks += [f"*{shows}*\n\n![{p}]({results}/{p})" for p, shows in self.pictures.items()]
        if sources:
            blocks.append(f"<sub>{provenance(sources)}</sub>")
        if self.command:
            blocks.append(f"```sh\n{self.command}\n```")
        return "\n\n".join(blocks) + "\n"


def summary(findings: Iterable[Finding]) -> str:
    rows = [
        [f.claim, f.paper, "; ".join(test.brief for test in f.tests), f"**{f.outcome}**"]
        for f in findings
    ]
    return markdown_table(["finding", "paper", "here", "verdict"], rows)


def _short_commit(commit: str) -> str:
    """What was changed beside it still shows."""
    name, *changed = commit.split("-", 1)
    return "-".join([name[:7], *changed])


def provenance(records: Sequence[EvalRecord]) -> str:
    """What records were made with, in a line."""

    def of(name: str, one: str, many: str) -> str | None:
        values = sorted({value for r in records if (value := getattr(r, name)) is not None})
        values = sorted(map(_short_commit, values)) if name == "commit" else values
        listed = ", ".join(f"{v:,}" if isinstance(v, int) else str(v) for v in values)
        return f"{one if len(values) == 1 else many} {listed}" if values else None

    counted = any(r.metric != "train_seconds" for r in records)
    found = [
        of("device", "on", "on"), of("dtype", "computed in", "computed in"),
        of("weights", "weights", "weights"), of("n", "n", "n") if counted else None,
        of("draws", "draws", "draws"),
        of("length", "length", "lengths"), of("seed", "seed", "seeds"),
        of("sampler", "sampler", "samplers"), of("temperature", "temperature", "temperatures"),
        of("commit", "commit", "commits"), of("torch", "torch", "torch"),
    ]  # fmt: skip
    return "; ".join(part for part in found if part)


def missing(wanted: Iterable[str], there: Iterable[str], what: str) -> list[str]:
    """A paragraph that names what is not there, if anything."""
    found = set(there)
    lacking = [name for name in wanted if name not in found]
    return [f"Not measured ({what}): {', '.join(lacking)}."] if lacking else []


def by_method(
    first: str,
    columns: Sequence[str],
    cells: Mapping[str, Mapping[str, Estimate]],
    *,
    digits: int | None = None,
    best: bool = True,
) -> str:
    """A line per method; the lowest of each column is bold if that is the `best`."""
    lowest = {
        column: min((row[column].value for row in cells.values() if column in row), default=None)
        for column in columns
    }

    def cell(row: Mapping[str, Estimate], column: str) -> str:
        if column not in row:
            return ""
        text = row[column].shown(digits)
        return f"**{text}**" if best and row[column].value == lowest[column] else text

    rows = [[name, *(cell(row, c) for c in columns)] for name, row in cells.items()]
    return markdown_table([first, *columns], rows)


def beside_real(title: str, real: Estimate | None, digits: int | None = None) -> str:
    """The heading of a table, with what it would say of real text."""
    return f"*{title}:*" if real is None else f"*{title} (real text: {real.shown(digits)}):*"


def of_paper(table: PaperTable, *, folded: bool = False) -> str:
    """The paper's table, as it stands there."""
    grid = markdown_table(["", *table.columns], [[name, *row] for name, row in table.rows.items()])
    title = f"The paper's <code>{table.label}</code>: {table.about}"
    return fold(title, grid) if folded else f"*{title}:*\n\n{grid}"


def fold(title: str, body: str) -> str:
    """Shown when clicked."""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:+.{digits}f} %"


def as_share(log_ratio: Estimate) -> str:
    """A difference of logarithms as a percentage of what it is counted from."""
    error = log_ratio.stderr * math.exp(log_ratio.value)
    return f"{percent(math.expm1(log_ratio.value))} ± {100 * error:.1f}".replace("nan", "?")


def listed(names: Iterable[object]) -> str:
    """In words; numbers as people write them."""
    *others, last = [f"{name:,}" if isinstance(name, int) else str(name) for name in names]
    return f"{', '.join(others)} and {last}" if others else last
