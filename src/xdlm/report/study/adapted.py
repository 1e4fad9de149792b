"""A masked model that goes on as a mixed one, beside the paper's three controls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath

from xdlm.evaluation.records import EvalRecord
from xdlm.report.comparison import ALWAYS, check_alike, method_of
from xdlm.report.study import paper
from xdlm.report.study.beside import ADAPTED as FOLDER
from xdlm.report.study.beside import Samples, plot_curves
from xdlm.report.study.collection import Grid, Study, start_of
from xdlm.report.study.commands import measure_again, repeat_again
from xdlm.report.study.likelihood import MASKED, MIXED
from xdlm.report.study.page import Section, by_method, fold, missing, of_paper
from xdlm.report.study.verdict import Finding, estimate
from xdlm.report.study.writing import FEWEST, all_steps, compared, entropies

UNTOUCHED, RESAMPLED = "untouched", "XDLM sampler only"
CONTINUED, ADAPTED = f"continued as {MASKED}", f"continued as {MIXED}"
AGAIN_TITLE = "Adapted again"
_ARMS = (UNTOUCHED, RESAMPLED, CONTINUED, ADAPTED)
#: Of 256 tokens, as the texts here: what the paper's scores are of.
PUBLISHED_STEPS = 32
_SAMPLERS = (
    "The paper scores answers to tasks, written by its refinement sampler, which begins with masks alone "
    "and fills in what it is most confident of. Here free texts are drawn from the reverse process, which "
    f"begins with noise of the sampler's kind: under {RESAMPLED} a tenth of that are random tokens, such "
    "as the masked model never saw."
)


def adaptation(study: Study) -> Section:
    arms = _arms(study)
    written = [r for own in arms.values() for r in own if r.metric in ("gen_ppl", "entropy")]
    _check(written)
    judged = {judge: _grid(arms, "gen_ppl", judge) for judge in study.judges}
    judged = {judge: cells for judge, cells in judged.items() if ADAPTED in cells}
    entropy = _grid(arms, "entropy", None)
    there = {n for cells in judged.values() for n in all_steps(cells)}
    fewest = min(there, default=FEWEST)
    asked = sorted({fewest, PUBLISHED_STEPS if PUBLISHED_STEPS in there else fewest})
    parts = [_story(arms), _SAMPLERS] if arms.get(ADAPTED) else []
    for judge, cells in judged.items():
        parts += [f"*Perplexity under {judge}, by sampling steps:*", _table(cells)]
    if judged and entropy:
        parts += ["*Entropy, nats:*", _table(entropy, digits=3, best=False)]
    if read := _grid_of_text(arms, study.validation):
        parts += [f"*Perplexity of {study.validation}:*", by_method("", ["perplexity"], read)]
    parts += [of_paper(paper.ADAPTATION)]
    parts += missing(_ARMS, [name for name, own in arms.items() if own], "kinds of run")
    real = study.real(None)
    findings = [
        Finding(
            f"{steps} sampling steps: {ADAPTED} writes better than {other}",
            _published(other) if steps == asked[-1] else "",
            compared(judged, ADAPTED, other, steps),
            entropies(entropy, real, ADAPTED, other, steps) if judged else "",
        )
        for steps in asked for other in (CONTINUED, RESAMPLED, UNTOUCHED)
    ]  # fmt: skip
    records = written if judged else []
    runs = {name: PurePosixPath(own[0].model).name for name, own in arms.items() if own}
    parts += _texts({**runs, RESAMPLED: f"{runs.get(UNTOUCHED)}-as-xdlm"}, study.samples)
    curves = {n: study.curves[runs[n]] for n in (CONTINUED, ADAPTED) if runs.get(n) in study.curves}
    figures = {"adaptation": partial(plot_curves, curves)} if curves else {}
    return Section(
        "Adaptation of a masked model", ("tab:llada_performance",), parts, findings, figures,
        records=records, command=measure_again(study),
    )  # fmt: skip


def adapted_again(study: Study) -> Section | None:
    """The same of another masked model, trained with another seed."""
    other = study.readapted
    if other is None:
        return None
    one, theirs = adaptation(other), of_paper(paper.ADAPTATION)
    return replace(
        one, title=AGAIN_TITLE, labels=(), parts=[part for part in one.parts if part != theirs],
        findings=[replace(f, claim=f"{AGAIN_TITLE}: {f.claim}") for f in one.findings],
        figures={f"{name}-again": plot for name, plot in one.figures.items()},
        command=f"{repeat_again(other, whole=True)} --out results/repro/{FOLDER}",
    )  # fmt: skip


def _texts(runs: Mapping[str, str], samples: Samples) -> list[str]:
    """The first text of each kind of run, from few steps to many."""
    found = {name: samples[run] for name, run in runs.items() if run in samples}
    return [
        fold(
            f"Texts of {steps} steps",
            "\n\n".join(
                f"*{name}*\n\n{_quoted(own[steps][0])}" for name, own in found.items() if own.get(steps)
            ),
        )
        for steps in sorted({steps for own in found.values() for steps in own})
    ]  # fmt: skip


def _quoted(text: str) -> str:
    """As it is, whatever signs it holds; a fence of as many ticks as that takes."""
    ticks = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}text\n{text.strip()}\n{fence}"


def _published(other: str) -> str:
    """The paper has scores of tasks, higher is better."""
    pairs = [
        (paper.ADAPTATION.value(ADAPTED, task), paper.ADAPTATION.value(other, task))
        for task in paper.ADAPTATION.columns
    ]
    ahead = sum(ours > theirs for ours, theirs in pairs if ours is not None and theirs is not None)
    ours, theirs = (paper.ADAPTATION.value(row, "MBPP") for row in (ADAPTED, other))
    return f"ahead in {ahead} of {len(pairs)} tasks, as MBPP {ours:.1f} > {theirs:.1f}"


def _arms(study: Study) -> dict[str, list[EvalRecord]]:
    """Records of each kind of run: what it began with, and three ways on from there."""
    continued = [r for r in study.adapted if method_of(r) == MASKED]
    adapted = [r for r in study.adapted if method_of(r) == MIXED]
    base = [r for r in study.last if method_of(r) == MASKED]
    models = {r.model for r in base}
    other = [r for r in study.resampled if r.model in models and r.step == study.step]
    return {
        UNTOUCHED: base, RESAMPLED: other, CONTINUED: _at_end(continued), ADAPTED: _at_end(adapted),
    }  # fmt: skip


def _at_end(records: Sequence[EvalRecord]) -> list[EvalRecord]:
    last = max((r.step for r in records), default=0)
    return [r for r in records if r.step == last]


def _check(records: Sequence[EvalRecord]) -> None:
    """As for the methods, but samplers differ: that is the question."""
    check_alike(records, ALWAYS, "adaptation")
    columns: dict[tuple[object, ...], list[EvalRecord]] = {}
    for record in records:
        columns.setdefault((record.metric, record.steps, record.judge), []).append(record)
    for own in columns.values():
        check_alike(own, ("temperature", "top_p", "n", "judge_sha256"), "adaptation")


def _grid(arms: Mapping[str, list[EvalRecord]], metric: str, judge: str | None) -> Grid[int]:
    """Of numbers of steps at which an adapted model was looked at."""
    steps = {r.steps for r in arms[ADAPTED] if r.metric == metric}
    found: Grid[int] = {}
    for name, own in arms.items():
        for record in own:
            if record.metric == metric and record.judge == judge and record.steps in steps:
                found.setdefault(name, {})[record.steps or 0] = estimate(record)
    return found


def _grid_of_text(arms: Mapping[str, list[EvalRecord]], data: str | None) -> Grid[str]:
    """Perplexity of a text; a sampler changes nothing about it."""
    found: Grid[str] = {}
    for name in (UNTOUCHED, CONTINUED, ADAPTED):
        for record in arms[name]:
            if record.metric == "ppl" and record.data == data:
                found[name] = {"perplexity": estimate(record)}
    return found if ADAPTED in found else {}


def _table(cells: Grid[int], *, digits: int | None = None, best: bool = True) -> str:
    rows = {name: {str(n): found for n, found in row.items()} for name, row in cells.items()}
    return by_method("", [str(n) for n in all_steps(cells)], rows, digits=digits, best=best)


def _story(arms: Mapping[str, list[EvalRecord]]) -> str:
    lines = []
    for name in (CONTINUED, ADAPTED):
        for record in arms[name][:1]:
            lines.append(f"{name}: step {record.step:,}, from {start_of(record)}")
    return "; ".join(lines) + "."
