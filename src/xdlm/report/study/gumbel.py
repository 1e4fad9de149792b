"""Texts drawn as published implementations draw them, beside exact ones of the same models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from xdlm.report.study import paper
from xdlm.report.study.beside import GUMBEL
from xdlm.report.study.collection import Drawn, Grid, Study, seed_of
from xdlm.report.study.commands import draw_again, repeat_again
from xdlm.report.study.course import gaps
from xdlm.report.study.crossover import PAPER, by_steps, crossings, plot_mixed
from xdlm.report.study.likelihood import MASKED, MIXED
from xdlm.report.study.page import Plot, Section, as_share, listed
from xdlm.report.study.trained import what_it_took
from xdlm.report.study.verdict import (
    Estimate,
    Finding,
    Test,
    combination,
    difference,
    logarithm,
    positive,
    unmeasured,
)
from xdlm.report.study.writing import FEWEST, all_steps, compared, entropies, numbers_of_texts
from xdlm.report.tables import markdown_table

TITLE = "Drawn by float32 noise"
_WAYS = ("exact draws", "float32 noise")
#: Where both ways belong, for the report to find them.
_FOLDER = f"results/repro/{GUMBEL}"
_ENTROPY = by_steps(paper.OWT_ENTROPY)


def drawn_by_gumbel(study: Study) -> Section | None:
    drawn = study.drawn
    if drawn is None:
        return None
    judged = {judge: drawn.gumbel.written(judge) for judge in drawn.gumbel.judges}
    steps = all_steps(drawn.gumbel.written(None))
    figures: dict[str, Plot] = {"gumbel": partial(_plot, drawn)} if judged else {}
    records = [r for one in drawn for r in one.last if r.metric in ("gen_ppl", "entropy")]
    return Section(
        TITLE, ("tab:owt_performance",),
        [
            _about(drawn), *what_it_took(drawn.exact),
            *(_perplexities(drawn, judge) for judge in judged), crossings(judged), _entropies(drawn, steps),
        ],
        [*_orderings(drawn, judged, steps), _falling(drawn, steps)], figures, records,
        f"{repeat_again(drawn.exact)} --out {_FOLDER}\n{draw_again(drawn.gumbel)} --out {_FOLDER}",
    )  # fmt: skip


def _about(drawn: Drawn) -> str:
    seeds = sorted({seed_of(r) for r in drawn.gumbel.last})
    return (
        f"{listed(drawn.gumbel.methods)} of training seed {listed(seeds)} at step {drawn.gumbel.step:,}. "
        "Published implementations draw a token as the largest of p / E, with E = -log u from uniform "
        "float32 numbers u. The smallest E is 2^-24, so that rare tokens starve, and the more so the more "
        "steps there are, since a masked position then has the less to give away in each (Zheng et al. "
        "2024, arXiv 2409.02908). Everything else on this page is drawn exactly; here the same models are "
        "sampled in both ways (`--impl gumbel`, whose texts hang on how many are drawn together: the "
        "command below gives others of the same law)."
    )


def _orderings(drawn: Drawn, judged: dict[str, Grid[int]], steps: Sequence[int]) -> list[Finding]:
    found = []
    for better, worse, n in ((MIXED, MASKED, FEWEST), (MASKED, MIXED, max(steps, default=FEWEST))):
        theirs = paper.OWT_QUALITY.column(n) if str(n) in paper.OWT_QUALITY.columns else {}
        figures = f"{theirs[better]:.1f} < {theirs[worse]:.1f}" if theirs else ""
        remark = entropies(drawn.gumbel.written(None), drawn.exact.real(None), better, worse, n)
        claim = f"{TITLE}: {n:,} sampling steps: {better} writes better than {worse}"
        found.append(Finding(claim, figures, compared(judged, better, worse, n), remark))
    return found


def _falling(drawn: Drawn, steps: Sequence[int]) -> Finding:
    """The fall of entropy from few to many steps, less that of exact draws."""
    few, many = FEWEST, max(steps, default=FEWEST)
    theirs = _ENTROPY[MASKED]
    return Finding(
        f"{TITLE}: from {few} to {many:,} steps the entropy of {MASKED}'s texts falls by more than that of "
        "exact draws",
        f"{theirs[few].value:.2f} to {theirs[many].value:.2f}" if many in theirs else "",
        [_fall(drawn, few, many)],
    )


def _fall(drawn: Drawn, few: int, many: int) -> Test:
    exact, gumbel = (one.written(None).get(MASKED, {}) for one in drawn)
    if not {few, many} <= exact.keys() & gumbel.keys():
        return unmeasured(f"{MASKED}'s entropy at {few} and {many:,} steps")
    terms = [(1.0, gumbel[few]), (-1.0, gumbel[many]), (-1.0, exact[few]), (1.0, exact[many])]
    words = [f"{row[few].shown(3)} to {row[many].shown(3)}" for row in (gumbel, exact)]
    brief = [f"{row[few].value:.2f} to {row[many].value:.2f}" for row in (gumbel, exact)]
    return positive(combination(terms), ", drawn exactly ".join(words), ", exactly ".join(brief))


def _perplexities(drawn: Drawn, judge: str) -> str:
    cells = [one.written(judge) for one in drawn]
    steps = all_steps(cells[1])
    rows = [
        [f"texts, {way}", *numbers_of_texts(one, judge, steps)]
        for way, one in zip(_WAYS, drawn, strict=True)
    ]
    for name in cells[1]:
        exact, gumbel = (one.get(name, {}) for one in cells)
        rows += _both(name, exact, gumbel, steps)
        changes = {n: _change(exact[n], gumbel[n]) for n in exact.keys() & gumbel.keys()}
        rows.append(["difference", *(changes.get(n, "") for n in steps)])
    for way, own in zip((*_WAYS, "the paper"), map(gaps, (*cells, PAPER)), strict=True):
        shown = (as_share(own[n]).removesuffix(" ± 0.0") if n in own else "" for n in steps)
        rows.append([f"{MIXED} against {MASKED}, {way}", *shown])
    table = markdown_table(["sampling steps", *(f"{n:,}" for n in steps)], rows)
    return f"*Perplexity under {judge}:*\n\n{table}"


def _change(exact: Estimate, gumbel: Estimate) -> str:
    return as_share(difference(logarithm(gumbel), logarithm(exact)))


def _entropies(drawn: Drawn, steps: Sequence[int]) -> str:
    exact, gumbel = (one.written(None) for one in drawn)
    rows = []
    for name in gumbel:
        rows += _both(name, exact.get(name, {}), gumbel[name], steps, 3)
        theirs = _ENTROPY.get(name, {})
        rows.append(
            ["the paper", *(f"{theirs[n].value:.3f}" if n in theirs else "" for n in steps)]
        )
    table = markdown_table(["sampling steps", *(f"{n:,}" for n in steps)], rows)
    return f"*Entropy of each text's own tokens, nats:*\n\n{table}"


def _both(
    name: str, exact: dict[int, Estimate], gumbel: dict[int, Estimate], steps: Sequence[int],
    digits: int | None = None,
) -> list[list[str]]:  # fmt: skip
    return [
        [f"{name}, {way}", *(row[n].shown(digits) if n in row else "" for n in steps)]
        for way, row in zip(_WAYS, (exact, gumbel), strict=True)
    ]


def _plot(drawn: Drawn, file: Path) -> None:
    """Mixed noise beside masked noise, in both ways to draw and in the paper."""
    plot_mixed(file, {
        judge: {way: one.written(judge) for way, one in zip(_WAYS, drawn, strict=True)}
        for judge in drawn.gumbel.judges
    })  # fmt: skip
