"""Methods that were trained again with another seed: what another training is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from xdlm.evaluation.perplexity import ZERO_SHOT_MEAN
from xdlm.report.comparison import method_of
from xdlm.report.study import paper
from xdlm.report.study.beside import AGAIN
from xdlm.report.study.collection import Study, seed_of
from xdlm.report.study.commands import repeat_again
from xdlm.report.study.course import gaps
from xdlm.report.study.crossover import crossings, plot_mixed
from xdlm.report.study.likelihood import MASKED, MIXED, reference
from xdlm.report.study.page import Plot, Section, as_share, listed, percent
from xdlm.report.study.pooling import MANY, is_same_judge, judges_again
from xdlm.report.study.trained import differing, train_seconds, what_it_took
from xdlm.report.study.verdict import (
    Estimate,
    Finding,
    across,
    below,
    difference,
    estimate,
    logarithm,
    pooled,
)
from xdlm.report.study.writing import all_steps, findings, numbers_of_texts
from xdlm.report.tables import markdown_table

TITLE = "Trained again"
#: For the report to find them.
_FOLDER = f"results/repro/{AGAIN}"
#: Of something, before and again.
Pair = tuple[Estimate, Estimate]


def trained_again(study: Study) -> Section | None:
    again = study.again
    if again is None or not again.last:
        return None
    pairs = judges_again(study, again).items()
    names = {other: judge for judge, other in pairs}  # as they are called before
    judged = {names.get(judge, judge): again.written(judge) for judge in again.judges}
    written = findings(judged, again.written(None), study.real(None), {})
    figures: dict[str, Plot] = {"again": partial(_plot, study, again)} if pairs else {}
    records = [r for r in again.last if r.metric in ("ppl", "gen_ppl", "entropy")]
    return Section(
        TITLE, (),
        [
            _about(study, again), *what_it_took(again), _reading(study, again),
            *(_writing(study, again, *pair) for pair in pairs), _worth(study, again), crossings(judged),
        ],
        [replace(f, claim=f"{TITLE}: {f.claim}") for f in (*_orderings(again), *written)],
        figures, [*train_seconds(again).values(), *records], f"{repeat_again(again)} --out {_FOLDER}",
    )  # fmt: skip


def _about(study: Study, again: Study) -> str:
    seeds = [sorted({seed_of(r) for r in one.last}) for one in (study, again)]
    ends = [
        {method_of(r): r for r in one.last if method_of(r) in again.methods}
        for one in (study, again)
    ]
    other = {name for method in ends[1] if method in ends[0]
             for name in differing([ends[0][method], ends[1][method]])} - {"train.seed"}  # fmt: skip
    alike = f"Their configurations differ in more: {', '.join(sorted(other))}." if other else (
        "By their configurations they were trained as before but for the seed."
    )  # fmt: skip
    rows = (
        "the same, in the same order" if _same_rows(study, again) else "others, or in another order"
    )
    return (
        f"{listed(again.methods)} of training seed {listed(seeds[1])} (before: {listed(seeds[0])}) at step "
        f"{again.step:,}. {alike} Rows of text are {rows}; generated texts are other ones."
    )


def _orderings(again: Study) -> list[Finding]:
    found = []
    for what, data, theirs in (
        ("Validation perplexity", again.validation, paper.VALIDATION.column("PPL")),
        ("Mean zero-shot perplexity", ZERO_SHOT_MEAN, paper.ZERO_SHOT.column(ZERO_SHOT_MEAN)),
    ):
        own = again.perplexities(data)
        found.append(
            Finding(
                f"{what}: {MASKED} ≤ {MIXED}",
                f"{theirs[MASKED]:.3f} < {theirs[MIXED]:.3f}",
                [below(MASKED, own.get(MASKED), MIXED, own.get(MIXED))],
            )
        )
    return found


def _same_rows(study: Study, again: Study) -> bool:
    """Whether what was read is the same, in the same order."""
    first, second = (
        {(r.data, r.n, r.seed) for r in one.of("ppl") if method_of(r) in again.methods}
        for one in (study, again)
    )
    return first == second


def _read(study: Study, again: Study, data: str | None) -> dict[str, Pair]:
    """Perplexities of a text by method, and that of an autoregressive model."""
    first, second = (one.perplexities(data) for one in (study, again))
    for one, found in ((study, first), (again, second)):
        if (record := reference(one, data)) is not None:
            found[method_of(record)] = estimate(record)
    if not _same_rows(study, again):
        first, second = (
            {name: e._replace(shares=()) for name, e in found.items()} for found in (first, second)
        )
    return {name: (first[name], second[name]) for name in second if name in first}


def _change(pair: Pair) -> Estimate:
    """log(again / before)."""
    first, second = map(logarithm, pair)
    return difference(second, first)


def _reading(study: Study, again: Study) -> str:
    texts = {
        f"perplexity of {study.validation}": _read(study, again, study.validation),
        "mean zero-shot": _read(study, again, ZERO_SHOT_MEAN),
    }
    names = dict.fromkeys(name for found in texts.values() for name in found)
    rows = [
        [name, *(cell for found in texts.values() for cell in _three(found.get(name)))]
        for name in names
    ]
    heads = [head for text in texts for head in (text, "again", "difference")]
    return markdown_table(["", *heads], rows) if rows else ""


def _three(pair: Pair | None) -> list[str]:
    if pair is None:
        return ["", "", ""]
    return [pair[0].shown(), pair[1].shown(), as_share(_change(pair))]


def _written(study: Study, again: Study, judge: str, other: str) -> dict[str, dict[int, Pair]]:
    """Perplexities under a judge, before and again, by method and number of steps."""
    first, second = study.written(judge), again.written(other)
    return {
        name: {n: (first[name][n], row[n]) for n in row if n in first.get(name, {})}
        for name, row in second.items()
    }


def _writing(study: Study, again: Study, judge: str, other: str) -> str:
    first, second = study.written(judge), again.written(other)
    steps, same = all_steps(second), is_same_judge(study, judge, again, other)
    rows = [
        ["texts", *numbers_of_texts(study, judge, steps)],
        ["texts, again", *numbers_of_texts(again, other, steps)],
    ]
    pairs = _written(study, again, judge, other)
    for name, row in second.items():
        before = first.get(name, {})
        rows.append([name, *(before[n].shown() if n in before else "" for n in steps)])
        rows.append([f"{name}, again", *(row[n].shown() if n in row else "" for n in steps)])
        if same:
            changes = {n: _change(pair) for n, pair in pairs[name].items()}
            rows.append(
                ["difference", *(as_share(changes[n]) if n in changes else "" for n in steps)]
            )
    found = [gaps(first), gaps(second)]
    for name, own in zip((f"{MIXED} against {MASKED}", "again"), found, strict=True):
        rows.append([name, *(as_share(own[n]) if n in own else "" for n in steps)])
    both = {n: across([own[n] for own in found]) for n in steps if all(n in own for own in found)}
    rows.append(["over both", *(as_share(both[n]) if n in both else "" for n in steps)])
    who = (
        judge if same else f"{judge}, trained again too: its values compare within a training alone"
    )
    table = markdown_table(["sampling steps", *(f"{n:,}" for n in steps)], rows)
    return f"*Perplexity under {who}:*\n\n{table}"


def _worth(study: Study, again: Study) -> str:
    """What another training changes, in a sentence for each kind of perplexity."""
    read = [
        _change(pair)
        for data in (study.validation, ZERO_SHOT_MEAN)
        for name, pair in _read(study, again, data).items() if name in again.methods
    ]  # fmt: skip
    told = [f"perplexity of text by {_range(read)}"] if read else []
    for judge, other in judges_again(study, again).items():
        if is_same_judge(study, judge, again, other):
            rows = _written(study, again, judge, other).values()
            changes = [_change(pair) for row in rows for pair in row.values()]
            told += (
                [f"that of generated text under {judge} by {_range(changes)}"] if changes else []
            )
    moved = {
        (judge, n): difference(own[n], before[n])
        for judge, before, own in _gaps(study, again)
        for n in own if n in before
    }  # fmt: skip
    if moved:
        known = [place for place in moved if moved[place].stderr > 0]
        judge, steps = max(known or moved, key=lambda place: _sureness(moved[place]))
        told.append(
            f"the gap in generated text from {MASKED} to {MIXED} by {_range([*moved.values()])} (by the "
            f"most standard errors of these texts, {_sureness(moved[judge, steps]):.1f}, under {judge} in "
            f"{steps:,} steps)"
        )
    told += _many(study, again)
    return f"Another training changes {'; '.join(told)}." if told else ""


def _gaps(study: Study, again: Study) -> list[tuple[str, dict[int, Estimate], dict[int, Estimate]]]:
    """By judge the gap from masked to mixed noise by number of steps, before and again."""
    return [
        (judge, gaps(study.written(judge)), gaps(again.written(other)))
        for judge, other in judges_again(study, again).items()
    ]


def _many(study: Study, again: Study) -> list[str]:
    """How the gap in many steps changes, all of them together."""
    told = []
    for judge, *both in _gaps(study, again):
        parts = [[own[n] for n in MANY if n in own] for own in both]
        if all(parts):
            change = difference(pooled(parts[1]), pooled(parts[0]))
            told.append(
                f"{as_share(change)} under {judge} ({_sureness(change):.1f} standard errors)"
            )
    return [f"that over {listed(MANY)} steps together by {listed(told)}"] if told else []


def _sureness(found: Estimate) -> float:
    """How many of its standard errors it is."""
    return abs(found.value) / found.stderr if found.stderr > 0 else math.nan


def _range(found: Sequence[Estimate]) -> str:
    values = sorted(math.expm1(e.value) for e in found)
    return f"{percent(values[0])} to {percent(values[-1])}"


def _plot(study: Study, again: Study, file: Path) -> None:
    """Mixed noise beside masked noise in both trainings, and in the paper."""
    plot_mixed(file, {
        judge: {"trained first": study.written(judge), "trained again": again.written(other)}
        for judge, other in judges_again(study, again).items()
    })  # fmt: skip
