"""Texts drawn as published implementations draw them, or by the law of such draws, beside exact ones of the
same models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from xdlm.report.study import paper
from xdlm.report.study.beside import GUMBEL
from xdlm.report.study.collection import Drawn, Grid, Study, ordered, seed_of
from xdlm.report.study.commands import draw_again, repeat_again
from xdlm.report.study.course import gaps
from xdlm.report.study.crossover import PAPER, by_steps, crossings, plot_mixed
from xdlm.report.study.likelihood import MASKED, MIXED
from xdlm.report.study.page import Plot, Section, as_share, listed
from xdlm.report.study.pooling import judges_again
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
from xdlm.sampling import STARVED

TITLE = "Drawn by float32 noise"
#: How texts were drawn, by sampler, and what claims about them begin with.
_EXACT = "exact draws"
_WAYS = {GUMBEL: "float32 noise", STARVED: "the law of float32 noise"}
_CLAIMS = {sampler: f"Drawn by {way}" for sampler, way in _WAYS.items()}
#: Where all ways belong, for the report to find them.
_FOLDER = f"results/repro/{GUMBEL}"
_ENTROPY = by_steps(paper.OWT_ENTROPY)


def drawn_by_gumbel(study: Study) -> Section | None:
    drawn = study.drawn
    if drawn is None:
        return None
    ways = {_EXACT: drawn.exact, **{_WAYS[name]: own for name, own in drawn.noisy.items()}}
    judges = sorted({judge for own in drawn.noisy.values() for judge in own.judges})
    # What a judge is called on the rest of the page, where it is the same one.
    called = {other: judge for judge, other in judges_again(study, drawn.exact).items()}
    figures: dict[str, Plot] = {"gumbel": partial(_plot, ways, judges, called)} if judges else {}
    records = [r for one in drawn.ways for r in one.last if r.metric in ("gen_ppl", "entropy")]
    commands = [
        repeat_again(drawn.exact),
        *(draw_again(own, name) for name, own in drawn.noisy.items()),
    ]
    return Section(
        TITLE, ("tab:owt_performance",),
        [
            _about(drawn), *what_it_took(drawn.exact),
            *(_perplexities(ways, judge, called) for judge in judges),
            *(_crossings(_WAYS[name], own, called) for name, own in drawn.noisy.items()), _entropies(ways),
        ],
        [finding for name in drawn.noisy for finding in _findings(drawn, name, called)], figures, records,
        "\n".join(f"{command} --out {_FOLDER}" for command in commands),
    )  # fmt: skip


def _about(drawn: Drawn) -> str:
    methods = ordered({method for own in drawn.noisy.values() for method in own.methods})
    seeds = sorted({seed_of(r) for r in drawn.exact.last})
    said = (
        f"{listed(methods)} of training seed {listed(seeds)} at step {drawn.exact.step:,}. "
        "Published implementations draw a token as the largest of p / E, with E = -log u from uniform "
        "float32 numbers u. The smallest E is 2^-24, so that rare tokens starve, and the more so the more "
        "steps there are, since a masked position then has the less to give away in each (Zheng et al. "
        "2024, arXiv 2409.02908). All other texts of trained models on this page are drawn exactly; these "
        "are also drawn by such noise (`--impl gumbel`, whose texts hang on how many are drawn together: "
        "the commands below give others of the same law)"
    )
    law = (
        ", and by exact draws of which as many are taken back as such noise starves (`--impl starved`): "
        "nearly the same law in less time"
    )
    return f"{said}{law if STARVED in drawn.noisy else ''}."


def _findings(drawn: Drawn, sampler: str, called: Mapping[str, str]) -> list[Finding]:
    """Few steps and many, all of the many together, and how much variety is lost on the way."""
    noisy, claim = drawn.noisy[sampler], _CLAIMS[sampler]
    judged = _judged(noisy, called)
    steps = all_steps(noisy.written(None))
    found = []
    for better, worse, n in ((MIXED, MASKED, FEWEST), (MASKED, MIXED, max(steps, default=FEWEST))):
        theirs = paper.OWT_QUALITY.column(n) if str(n) in paper.OWT_QUALITY.columns else {}
        figures = f"{theirs[better]:.1f} < {theirs[worse]:.1f}" if theirs else ""
        remark = entropies(noisy.written(None), drawn.exact.real(None), better, worse, n)
        words = f"{claim}: {n:,} sampling steps: {better} writes better than {worse}"
        found.append(Finding(words, figures, compared(judged, better, worse, n), remark))
    return [*found, _falling(drawn.exact, noisy, claim, steps)]


def _falling(exact: Study, noisy: Study, claim: str, steps: Sequence[int]) -> Finding:
    """The fall of entropy from few to many steps, less that of exact draws."""
    few, many = FEWEST, max(steps, default=FEWEST)
    theirs = _ENTROPY[MASKED]
    return Finding(
        f"{claim}: from {few} to {many:,} steps the entropy of {MASKED}'s texts falls by more than that of "
        "exact draws",
        f"{theirs[few].value:.2f} to {theirs[many].value:.2f}" if many in theirs else "",
        [_fall(exact, noisy, few, many)],
    )


def _fall(exact: Study, noisy: Study, few: int, many: int) -> Test:
    straight, starved = (one.written(None).get(MASKED, {}) for one in (exact, noisy))
    if not {few, many} <= straight.keys() & starved.keys():
        return unmeasured(f"{MASKED}'s entropy at {few} and {many:,} steps")
    terms = [
        (1.0, starved[few]),
        (-1.0, starved[many]),
        (-1.0, straight[few]),
        (1.0, straight[many]),
    ]
    words = [f"{row[few].shown(3)} to {row[many].shown(3)}" for row in (starved, straight)]
    brief = [f"{row[few].value:.2f} to {row[many].value:.2f}" for row in (starved, straight)]
    return positive(combination(terms), ", drawn exactly ".join(words), ", exactly ".join(brief))


def _judged(study: Study, called: Mapping[str, str]) -> dict[str, Grid[int]]:
    return {called.get(judge, judge): study.written(judge) for judge in study.judges}


def _crossings(way: str, study: Study, called: Mapping[str, str]) -> str:
    found = crossings(_judged(study, called))
    return f"By {way}: {found}" if found else ""


def _perplexities(ways: Mapping[str, Study], judge: str, called: Mapping[str, str]) -> str:
    cells = {way: one.written(judge) for way, one in ways.items()}
    exact, *noisy = cells.values()
    steps = sorted({n for one in noisy for n in all_steps(one)})
    rows = [[f"texts, {way}", *numbers_of_texts(one, judge, steps)] for way, one in ways.items()]
    for name in ordered({name for one in noisy for name in one}):
        rows += _all_ways(name, cells, steps)
        for way, own in cells.items():
            if own is not exact:
                changes = {n: _change(exact[name][n], e) for n, e in own.get(name, {}).items()}
                rows.append([f"{name}, {way} against exact", *(changes.get(n, "") for n in steps)])
    for way, gap in zip((*ways, "the paper"), map(gaps, (*cells.values(), PAPER)), strict=True):
        shown = (as_share(gap[n]).removesuffix(" ± 0.0") if n in gap else "" for n in steps)
        rows.append([f"{MIXED} against {MASKED}, {way}", *shown])
    return f"*Perplexity under {called.get(judge, judge)}:*\n\n{_by_steps(steps, rows)}"


def _change(exact: Estimate, noisy: Estimate) -> str:
    return as_share(difference(logarithm(noisy), logarithm(exact)))


def _entropies(ways: Mapping[str, Study]) -> str:
    cells = {way: one.written(None) for way, one in ways.items()}
    _, *noisy = cells.values()
    steps = sorted({n for one in noisy for n in all_steps(one)})
    rows = []
    for name in ordered({name for one in noisy for name in one}):
        rows += _all_ways(name, cells, steps, 3)
        theirs = _ENTROPY.get(name, {})
        rows.append(
            [
                f"{name}, the paper",
                *(f"{theirs[n].value:.3f}" if n in theirs else "" for n in steps),
            ]
        )
    return f"*Entropy of each text's own tokens, nats:*\n\n{_by_steps(steps, rows)}"


def _by_steps(steps: Sequence[int], rows: list[list[str]]) -> str:
    return markdown_table(["sampling steps", *(f"{n:,}" for n in steps)], rows)


def _all_ways(
    name: str, cells: Mapping[str, Grid[int]], steps: Sequence[int], digits: int | None = None
) -> list[list[str]]:
    rows = {way: own.get(name, {}) for way, own in cells.items()}
    return [
        [f"{name}, {way}", *(row[n].shown(digits) if n in row else "" for n in steps)]
        for way, row in rows.items()
    ]


def _plot(
    ways: Mapping[str, Study], judges: Sequence[str], called: Mapping[str, str], file: Path
) -> None:
    """Mixed noise beside masked noise, in all ways to draw and in the paper."""
    plot_mixed(file, {
        called.get(judge, judge): {way: one.written(judge) for way, one in ways.items()}
        for judge in judges
    })  # fmt: skip
