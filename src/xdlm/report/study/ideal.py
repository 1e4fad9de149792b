"""Texts of a law whose tokens depend on each other, by ideal predictions: what is the noise's own doing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xdlm.evaluation.known_law import BOUND, ENTROPY, EXCESS, PERPLEXITY
from xdlm.evaluation.records import EvalRecord
from xdlm.report.colours import series_colours
from xdlm.report.comparison import method_of
from xdlm.report.figures import draw_by_steps
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
    table_of,
)
from xdlm.report.study.likelihood import MASKED, MIXED, UNIFORM
from xdlm.report.study.page import Plot, Section, as_share, fold, listed, percent
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
from xdlm.report.study.writing import all_steps
from xdlm.report.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Given ideal predictions"
#: Bounds that differ by less than this share count as alike: the paper's differ by 3.3 and 11 %.
_ALIKE = 0.03
_ABOUT = (
    "What is the noise's own doing, and what is it that networks have not learned? A hidden Markov model "
    "learns a real text, and its law is then the truth: texts are drawn from it, the ideal prediction "
    "p(x_i | all other positions of the noisy text) is calculated under every noise, and perplexities are "
    "the law's own (`xdlm eval draws --law markov`). Nothing is trained and nobody judges. The bound on "
    "the likelihood is then as tight under every noise, so a gap between methods that are trained is what "
    "they have not learned. What texts of few steps lack is what it costs to draw many tokens at once, "
    "none of them knowing of the others, and how much of that a noise lets later steps mend; with steps "
    "enough, and exact draws, texts have the law."
)


def ideal_predictions(study: Study) -> Section | None:
    records = [r for r in study.law if has_memory(r)]
    if not records:
        return None
    laws = by_law(records)
    figures: dict[str, Plot] = {"ideal": partial(_plot, laws)}
    tables = [part for own in laws.values() for part in _tables(own)]
    return Section(
        TITLE, ("tab:app_owt_valppl", "tab:owt_performance"), [_ABOUT, *tables], _findings(laws), figures,
        records, draw_known_again(records),
    )  # fmt: skip


def _findings(laws: Laws) -> list[Finding]:
    return [*_alike(laws), *_orders(laws, EXACT), *_orders(laws, NOISY)]


def _alike(laws: Laws) -> list[Finding]:
    """Whether the bound of each noise is that of masked noise, all of the same texts."""
    tests = [
        under(name, test)
        for name, own in laws.items()
        for test in _near({method_of(r): estimate(r) for r in own if r.metric == BOUND})
    ]
    theirs = paper.VALIDATION.column("PPL")
    gaps = ", ".join(percent(theirs[m] / theirs[MASKED] - 1) for m in (MIXED, UNIFORM))
    claim = f"{TITLE}, the bound of every noise is within {100 * _ALIKE:g} % of {MASKED}'s"
    return [Finding(claim, f"{MIXED} and {UNIFORM}, trained: {gaps}", tests)] if tests else []


def _near(bounds: dict[str, Estimate]) -> list[Test]:
    """The noise whose bound is furthest off, in either direction."""
    masked = bounds.get(MASKED)
    if masked is None or len(bounds) < 2:
        return []
    gaps = {
        method: difference(logarithm(bound), logarithm(masked))
        for method, bound in bounds.items()
        if method != MASKED
    }
    furthest = max(gaps, key=lambda method: abs(gaps[method].value))
    gap = gaps[furthest]
    room = Estimate(_ALIKE - abs(gap.value), gap.stderr)
    words = f"{len(gaps)} others, furthest off is {furthest}, {as_share(gap)}"
    return [positive(room, words, f"{furthest} {percent(math.expm1(gap.value))}")]


def _orders(laws: Laws, way: str) -> list[Finding]:
    """In the fewest and in the most steps that a law was drawn in."""
    drawn = {name: cells for name, own in laws.items() if (cells := cells_of(own, PERPLEXITY, way))}
    if not drawn:
        return []
    by = "" if way == EXACT else f", drawn by {way}"
    found = []
    for pick, better, worse in ((min, MIXED, MASKED), (max, MASKED, MIXED)):
        at = {name: pick(all_steps(cells)) for name, cells in drawn.items()}
        steps = listed(sorted(set(at.values())))
        claim = f"{TITLE}{by}, {steps} steps: {better} writes better than {worse}"
        tests = [
            under(name, _below(better, worse, cells, at[name])) for name, cells in drawn.items()
        ]
        found.append(Finding(claim, "", tests))
    return found


def _below(better: str, worse: str, cells: Grid[int], steps: int) -> Test:
    low, high = (cells.get(who, {}).get(steps) for who in (better, worse))
    return below(better, low, worse, high)


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


def _plot(laws: Laws, file: Path) -> None:
    """Perplexities over the law's own, a panel for each law and way to draw."""
    methods = ordered({method_of(r) for own in laws.values() for r in own})
    colours = series_colours(list(methods))

    def panel(name: str, way: str, axes: Axes) -> None:
        own = own_perplexity(laws[name]).value
        lines = over(cells_of(laws[name], PERPLEXITY, way), own)
        draw_by_steps(axes, lines, colours, f"perplexity / the law's ({name}, {way})", None)

    save_panels(file, [
        partial(panel, name, way) for name, own in laws.items() for way in (EXACT, NOISY)
        if cells_of(own, PERPLEXITY, way)
    ], small=True)  # fmt: skip
