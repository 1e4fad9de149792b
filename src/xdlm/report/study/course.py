"""What training did, and how the gap between mixed and masked noise goes as it goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xdlm.evaluation.perplexity import ZERO_SHOT_MEAN
from xdlm.evaluation.records import EvalRecord
from xdlm.report.comparison import method_of
from xdlm.report.dynamics import Course, leads, plot_dynamics
from xdlm.report.figures import lines_of
from xdlm.report.study import paper
from xdlm.report.study.collection import Grid, Study, grid
from xdlm.report.study.commands import measure_again
from xdlm.report.study.likelihood import MASKED, MIXED
from xdlm.report.study.page import Section, as_share, by_method, fold, of_paper, percent
from xdlm.report.study.verdict import (
    SURE,
    Estimate,
    Finding,
    Test,
    difference,
    logarithm,
    positive,
    unmeasured,
)
from xdlm.report.tables import markdown_table


@dataclass(frozen=True)
class Quantity:
    """Something that was measured at several training steps."""

    name: str
    short: str
    written: bool
    records: list[EvalRecord]
    cells: Grid[int]
    """By method and training step."""


def dynamics(study: Study) -> Section:
    found = [q for q in _quantities(study) if len(_steps(q.cells)) > 1]
    read = [q for q in found if not q.written]
    wrote = [q for q in found if q.written]
    parts = (
        [_gap_table(found, MIXED), _other_gaps(study, found), _leads(found)]
        if found
        else ["Not measured: needs results of two checkpoints of a model at least."]
    )
    parts += [_shown(q) for q in read]
    parts += [of_paper(paper.ZERO_SHOT_COURSE)]
    parts += [fold(q.name, _table(q)) for q in wrote]
    parts += [_entropies(study)]
    parts += [of_paper(paper.LM1B_COURSE, folded=True)]
    figures = {"dynamics": lambda file: _plot(found, file)} if found else {}
    records = [r for q in found for r in q.records]
    return Section(
        "Training dynamics", ("tab:lm1b_train_dynamic", "tab:owt_zsppl_vs_steps"),
        parts,
        [
            _finding("perplexity of text", paper.ZERO_SHOT_COURSE, read),
            _finding("perplexity of generated text (most steps)", paper.LM1B_COURSE, _most(wrote)),
        ],
        figures, records, measure_again(study),
    )  # fmt: skip


def _quantities(study: Study) -> list[Quantity]:
    """Texts, and what was written in the fewest and the most steps."""
    texts = [
        (study.validation, f"perplexity of {study.validation}", "validation"),
        (ZERO_SHOT_MEAN, "mean zero-shot perplexity", "zero-shot"),
    ]
    found = [
        Quantity(name, short, False, study.of("ppl", data=data, step=None), _read(study, data))
        for data, name, short in texts if data is not None
    ]  # fmt: skip
    for judge in study.judges:
        own = study.of("gen_ppl", judge=judge, step=None)
        several = {r.steps for r in own if r.step != study.step}
        numbers = sorted(n for n in several if n is not None)
        for steps in dict.fromkeys([*numbers[:1], *numbers[-1:]]):
            name = f"perplexity of texts of {steps:,} steps, {judge}"
            written = [r for r in own if r.steps == steps]
            cells = grid(written, lambda r: r.step)
            found.append(Quantity(name, f"{judge}:", True, written, cells))
    return found


def _entropies(study: Study) -> str:
    """What belongs beside perplexities of generated text, by training step."""
    own = study.of("entropy", step=None)
    early = {r.steps for r in own if r.step != study.step}
    tables = []
    for steps in sorted(n for n in early if n is not None):
        cells = grid([r for r in own if r.steps == steps], lambda r: r.step)
        shown = {name: {f"{step:,}": e for step, e in row.items()} for name, row in cells.items()}
        heads = [f"{step:,}" for step in _steps(cells)]
        table = by_method("training step", heads, shown, digits=3, best=False)
        tables.append(f"*Texts of {steps:,} steps:*\n\n{table}")
    return fold("Entropy of generated texts, nats", "\n\n".join(tables)) if tables else ""


def _read(study: Study, data: str) -> Grid[int]:
    """Perplexities of a text, with what each row adds where that was kept."""
    steps = sorted({r.step for r in study.of("ppl", data=data, step=None)})
    by_step = {step: study.perplexities(data, step) for step in steps}
    return {
        method: {step: found[method] for step, found in by_step.items() if method in found}
        for method in study.methods if any(method in found for found in by_step.values())
    }  # fmt: skip


def _most(wrote: Sequence[Quantity]) -> list[Quantity]:
    """For each judge that of the most steps."""
    last = {q.records[0].judge: q for q in wrote}
    return list(last.values())


def gaps(cells: Grid[int], method: str = MIXED) -> dict[int, Estimate]:
    """log(method / masked) by training step; row by row where rows were kept."""
    own, masked = cells.get(method, {}), cells.get(MASKED, {})
    both = sorted(set(own) & set(masked))
    finite = [s for s in both if math.isfinite(own[s].value) and math.isfinite(masked[s].value)]
    return {s: difference(logarithm(own[s]), logarithm(masked[s])) for s in finite}


def shrinks(name: str, short: str, found: Mapping[int, Estimate]) -> Test:
    """Whether the gap at the last checkpoint is smaller than at the first."""
    if len(found) < 2:
        return unmeasured(f"{name} of {MIXED} and {MASKED} at two checkpoints")
    (first, before), *_, (last, after) = found.items()
    words = f"{name}: {as_share(before)} at step {first:,}, {as_share(after)} at step {last:,}"
    brief = f"{short} {percent(math.expm1(before.value))} to {percent(math.expm1(after.value))}"
    return positive(difference(before, after), words, brief)


def _finding(what: str, table: paper.PaperTable, found: Sequence[Quantity]) -> Finding:
    first, last = (
        percent(table.column(step)[MIXED] / table.column(step)[MASKED] - 1)
        for step in (table.columns[0], table.columns[-1])
    )
    return Finding(
        f"As training goes on the gap from {MASKED} to {MIXED} shrinks, {what}",
        f"{first} to {last}",
        [shrinks(q.name, q.short, gaps(q.cells)) for q in found],
    )


def _other_gaps(study: Study, found: Sequence[Quantity]) -> str:
    others = [method for method in study.methods if method not in (MASKED, MIXED)]
    tables = [_gap_table(found, method) for method in others]
    body = "\n\n".join(filter(None, tables))
    return fold(f"Other methods against {MASKED} by training step", body) if body else ""


def _gap_table(found: Sequence[Quantity], method: str) -> str:
    by_name = {q.name: gaps(q.cells, method) for q in found}
    steps = sorted({step for own in by_name.values() for step in own})
    rows = [
        [name, *(as_share(own[step]) if step in own else "" for step in steps)]
        for name, own in by_name.items() if own
    ]  # fmt: skip
    if not rows:
        return ""
    title = f"*{method} against {MASKED} by training step:*\n\n"
    return title + markdown_table(["", *(f"{step:,}" for step in steps)], rows)


def _leads(found: Sequence[Quantity]) -> str:
    lines = []
    for q in found:
        told = [
            f"{lead.name} ({lead.start:,.0f} to {lead.stop:,.0f}{'' if lead.sure else ', not sure'})"
            for lead in leads(_course(q).lines)
        ]
        lines += [f"- {q.name}: {', '.join(told)}"] if told else []
    head = (
        "Who leads when, of those measured before and after (lines between checkpoints are "
        f"straight; not sure: by less than {SURE:g} standard errors at each, taken as independent):"
    )
    return "\n".join([head, "", *lines]) if lines else ""


def _steps(cells: Grid[int]) -> list[int]:
    return sorted({step for row in cells.values() for step in row})


def _shown(q: Quantity) -> str:
    return f"*{q.name[0].upper()}{q.name[1:]}:*\n\n{_table(q)}"


def _table(q: Quantity) -> str:
    cells = {name: {f"{step:,}": e for step, e in row.items()} for name, row in q.cells.items()}
    return by_method("training step", [f"{step:,}" for step in _steps(q.cells)], cells)


def _course(q: Quantity) -> Course:
    return Course(
        q.name,
        lines_of(q.records, method_of, lambda r: float(r.step)),
        True,
        None,
        q.records,
        same_steps=True,
    )


def _plot(found: Sequence[Quantity], file: Path) -> None:
    plot_dynamics([_course(q) for q in found], file, small=True)
