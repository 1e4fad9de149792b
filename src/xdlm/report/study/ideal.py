"""Texts of a law whose tokens depend on each other, by ideal predictions: what is the noise's own doing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from xdlm.evaluation.known_law import BOUND, ENTROPY, EXCESS, PERPLEXITY
from xdlm.evaluation.records import EvalRecord
from xdlm.report.colours import series_colours
from xdlm.report.comparison import method_of
from xdlm.report.figures import Lines, Point, draw_by_steps
from xdlm.report.plots import save_panels
from xdlm.report.study import paper
from xdlm.report.study.collection import Grid, Study, ordered
from xdlm.report.study.commands import draw_known_again
from xdlm.report.study.law_texts import (
    EXACT,
    NOISY,
    Laws,
    by_law,
    cells_of,
    has_memory,
    heading,
    over,
    own_perplexity,
    steps_of,
    table_of,
)
from xdlm.report.study.likelihood import MASKED, MIXED, UNIFORM
from xdlm.report.study.page import Plot, Section, as_share, fold, percent
from xdlm.report.study.verdict import (
    Estimate,
    Finding,
    Test,
    below,
    difference,
    estimate,
    logarithm,
    positive,
    under,
)
from xdlm.report.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Given ideal predictions"
#: What differs by less than this share counts as alike: the paper's likelihoods differ by 3.3 and 11 %.
_ALIKE = 0.03
#: Numbers of steps that make a curve.
_CURVE = 3
#: In how many of the fewest numbers of steps mixed noise is compared with the others.
_FEW = 3
_ABOUT = (
    "What is the noise's own doing, and what is it that networks have not learned? A hidden Markov model "
    "learns a real text, and its law is then the truth: the ideal prediction p(x_i | all other positions "
    "of the noisy text) is calculated under every noise, and texts drawn by it are measured under the law "
    "itself (`xdlm eval draws --law markov`). No network is trained, and nobody judges. In continuous time "
    "the bound of ideal predictions is the likelihood itself whatever the noise, so that a gap between the "
    "bounds of trained methods is what they have not learned. What texts of few steps lack is what it "
    "costs to draw many tokens at once, none of them knowing of the others, and how much of that a noise "
    "lets later steps mend. As steps grow in number, texts drawn exactly come to have the law."
)


def ideal_predictions(study: Study) -> Section | None:
    records = [r for r in study.law if has_memory(r)]
    if not records:
        return None
    laws = by_law(records)
    panels = _panels(laws)
    figures: dict[str, Plot] = (
        {"ideal": partial(save_panels, panels=panels, small=True)} if panels else {}
    )
    tables = [part for own in laws.values() for part in _tables(own)]
    return Section(
        TITLE, ("tab:app_owt_valppl", "tab:owt_performance"), [_ABOUT, *tables], _findings(laws), figures,
        records, draw_known_again(records), aside=True,
    )  # fmt: skip


def _findings(laws: Laws) -> list[Finding]:
    return [*_bounds_alike(laws), *_fewest(laws), *_most(laws), *_starved(laws)]


def _bounds_alike(laws: Laws) -> list[Finding]:
    """Whether the bound of each noise is that of masked noise, of the same texts."""
    tests = []
    for name, own in laws.items():
        bounds = {method_of(r): estimate(r) for r in own if r.metric == BOUND}
        masked = bounds.pop(MASKED, None)
        if masked is not None:
            tests += _named(name, [_alike(m, bounds[m], masked) for m in ordered(bounds)])
    theirs = paper.VALIDATION.column("PPL")
    gaps = ", ".join(f"{m} {percent(theirs[m] / theirs[MASKED] - 1)}" for m in (MIXED, UNIFORM))
    claim = f"{TITLE}, the bound is within {100 * _ALIKE:g} % of {MASKED}'s under every noise"
    return [Finding(claim, f"trained: {gaps}", tests)] if tests else []


def _named(law: str, tests: list[Test]) -> list[Test]:
    """Tests of one law, which the first of them names."""
    return [under(law, test) for test in tests[:1]] + tests[1:]


def _alike(name: str, one: Estimate, other: Estimate) -> Test:
    """Whether two differ by so little that chance does not hide a difference either."""
    gap = difference(logarithm(one), logarithm(other))
    room = Estimate(_ALIKE - abs(gap.value), gap.stderr)
    words = f"{name} {as_share(gap)}"
    return Test(positive(room, words, words).outcome, words, words)


def _fewest(laws: Laws) -> list[Finding]:
    """In the fewest steps, not the most: which is nearer to the law, all being above it."""
    found = []
    for other in (MASKED, UNIFORM):
        for name, own in laws.items():
            cells = cells_of(own, PERPLEXITY, EXACT)
            for steps in steps_of(cells, MIXED, other)[:-1][:_FEW]:
                test = below(MIXED, cells[MIXED][steps], other, cells[other][steps])
                claim = f"{TITLE}, {steps:,} steps: {MIXED}'s texts have a lower perplexity than {other}'s"
                found.append(Finding(claim, "", [under(name, test)]))
    return found


def _most(laws: Laws) -> list[Finding]:
    """Whether texts have the law's own perplexity in the most steps that both were drawn in."""
    found = []
    for name, own in laws.items():
        cells, law = cells_of(own, PERPLEXITY, EXACT), own_perplexity(own)
        for steps in steps_of(cells, MASKED, MIXED)[-1:]:
            claim = (
                f"{TITLE}, {steps:,} steps: texts are within {100 * _ALIKE:g} % of the law's own "
                f"perplexity, those of {MASKED} and of {MIXED}"
            )
            tests = [_alike(method, cells[method][steps], law) for method in (MASKED, MIXED)]
            found.append(Finding(claim, "", _named(name, tests)))
    return found


def _starved(laws: Laws) -> list[Finding]:
    """What float32 noise makes of the law in the most steps."""
    found = []
    for name, own in laws.items():
        cells, law = cells_of(own, PERPLEXITY, NOISY), own_perplexity(own)
        for steps in steps_of(cells, MASKED, MIXED)[-1:]:
            claim = f"{TITLE}, drawn by {NOISY}, {steps:,} steps: {MASKED}'s texts have a lower perplexity"
            masked, mixed = (cells[method][steps] for method in (MASKED, MIXED))
            found += [
                Finding(f"{claim} than the law says", "", [
                    under(name, below(MASKED, masked, "the law", law))
                ]),
                Finding(f"{claim} than {MIXED}'s", "", [under(name, below(MASKED, masked, MIXED, mixed))]),
            ]  # fmt: skip
    return found


def _tables(records: Sequence[EvalRecord]) -> list[str]:
    name = records[0].model
    entropies = fold(
        f"Entropy of each text's own tokens, nats ({name})", table_of(records, ENTROPY, 3)
    )
    return [
        heading(records), table_of(records, PERPLEXITY), *_beyond(records), entropies, *_bounds(records)
    ]  # fmt: skip


def _beyond(records: Sequence[EvalRecord]) -> list[str]:
    """How far above masked noise the others are, drawn exactly."""
    cells = cells_of(records, PERPLEXITY, EXACT)
    masked = cells.get(MASKED, {})
    steps = sorted(masked)
    rows = [
        [method, *(_ahead(row[n], masked[n]) if n in row else "" for n in steps)]
        for method, row in cells.items()
        if method != MASKED
    ]
    if not rows:
        return []
    heads = ["sampling steps", *(f"{n:,}" for n in steps)]
    return [f"*The same against {MASKED}'s:*", markdown_table(heads, rows)]


def _ahead(one: Estimate, other: Estimate) -> str:
    return as_share(difference(logarithm(one), logarithm(other)))


def _bounds(records: Sequence[EvalRecord]) -> list[str]:
    found = {method_of(r): r for r in records if r.metric == BOUND}
    masked = estimate(found[MASKED]) if MASKED in found else None
    rows = []
    for method in ordered(found):
        r, bound = found[method], estimate(found[method])
        excess = Estimate(r.details[EXCESS], r.details.get(f"{EXCESS}_stderr", math.nan))
        gap = "" if masked is None or method == MASKED else _ahead(bound, masked)
        rows.append([method, bound.shown(), gap, f"{r.details[PERPLEXITY]:.2f}", excess.shown(3)])
    heads = [
        "", "bound on perplexity", f"against {MASKED}'s", "the law's own", "nats a token beyond it"
    ]  # fmt: skip
    title = f"*The bound of ideal predictions on the same texts of {records[0].model}:*"
    return [title, markdown_table(heads, rows)] if rows else []


def _panels(laws: Laws) -> list[Callable[[Axes], None]]:
    """Perplexities over the law's own, for each law and way to draw that has a curve to show; and exact
    draws against those of masked noise."""
    colours = series_colours(ordered({method_of(r) for own in laws.values() for r in own}))

    def panel(name: str, way: str, axes: Axes) -> None:
        lines = over(cells_of(laws[name], PERPLEXITY, way), own_perplexity(laws[name]).value)
        draw_by_steps(axes, lines, colours, f"perplexity / the law's ({name}, {way})", None)

    def beside(name: str, axes: Axes) -> None:
        lines = _over_masked(cells_of(laws[name], PERPLEXITY, EXACT))
        draw_by_steps(axes, lines, colours, f"exact draws' / {MASKED}'s ({name})", None)
        axes.axhline(1.0, color=colours[MASKED], linewidth=1.4)

    panels: list[Callable[[Axes], None]] = []
    for name, own in laws.items():
        for way in (EXACT, NOISY):
            cells = cells_of(own, PERPLEXITY, way)
            if max(map(len, cells.values()), default=0) < _CURVE:
                continue
            panels.append(partial(panel, name, way))
            panels += [partial(beside, name)] if way == EXACT and _over_masked(cells) else []
    return panels


def _over_masked(cells: Grid[int]) -> Lines:
    """As shares of what masked noise has in as many steps."""
    masked = cells.get(MASKED, {})
    found: Lines = {}
    for method, row in cells.items():
        gaps = {
            n: difference(logarithm(row[n]), logarithm(masked[n]))
            for n in sorted(row.keys() & masked.keys())
        }
        ratios = {n: math.exp(gap.value) for n, gap in gaps.items()}
        if ratios and method != MASKED:
            found[method] = [Point(float(n), r, r * gaps[n].stderr) for n, r in ratios.items()]
    return found
