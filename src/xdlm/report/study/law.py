"""Texts of a known law: what float32 noise does to each method, apart from any model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xdlm.errors import UserError
from xdlm.evaluation.known_law import CALCULATED, ENTROPY, PERPLEXITY
from xdlm.evaluation.records import EvalRecord
from xdlm.report.colours import series_colours
from xdlm.report.comparison import ALWAYS, check_alike, method_of
from xdlm.report.figures import Lines, Point, draw_by_steps
from xdlm.report.plots import save_panels
from xdlm.report.study import paper
from xdlm.report.study.beside import GUMBEL
from xdlm.report.study.collection import Grid, Study, grid
from xdlm.report.study.commands import draw_known_again
from xdlm.report.study.crossover import by_steps
from xdlm.report.study.likelihood import MASKED, MIXED
from xdlm.report.study.page import Plot, Section, fold
from xdlm.report.study.verdict import Estimate, Finding, Test, below, under
from xdlm.report.study.writing import FEWEST, all_steps
from xdlm.report.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Drawn from a known law"
#: What records of one law have in common, and what those of texts have too.
_ALIKE, _DRAWN = (*ALWAYS, "temperature", "top_p"), ("n",)
_THE_LAW = "the law"
#: Drawn by float64 noise in published code, so that its texts are no others.
_EXACT = "UDLM"
_ENTROPIES = by_steps(paper.OWT_ENTROPY)


def known_laws(study: Study) -> Section | None:
    if not study.law:
        return None
    laws = {name: _checked(name, study.law) for name in dict.fromkeys(r.model for r in study.law)}
    figures: dict[str, Plot] = {"law": partial(_plot, laws)}
    tables = [part for own in laws.values() for part in _tables(own)]
    return Section(
        TITLE, ("tab:owt_performance",), [_ABOUT, *tables, *_falls(laws, study.written(None))],
        _findings(laws), figures, study.law, draw_known_again(study.law),
    )  # fmt: skip


_ABOUT = (
    "No denoiser is trained, nobody judges: every position of these texts has a law of its own, "
    "independent of the others, and the sampler is given just that as predictions (`xdlm eval draws`). "
    "Drawn exactly, texts have the law's own perplexity under every noise and in any number of steps. "
    "So what float32 noise makes of it is that noise's doing alone; it can also be calculated "
    "(`--calculate`), without chance. The paper's published code draws MDLM, GIDD and XDLM by float32 "
    "noise and UDLM by float64 noise, unless it is told otherwise. How much is lost depends on the law:"
    " Zipf's is that of bare frequencies of tokens, flatter than what a model predicts once a part of "
    "the text is there. And what starves in one place changes what is predicted in others, which these "
    "texts leave out."
)


def _checked(name: str, records: Sequence[EvalRecord]) -> list[EvalRecord]:
    own = [r for r in records if r.model == name]
    check_alike(own, _ALIKE, f"the law {name}")
    check_alike([r for r in own if r.sampler != CALCULATED], _DRAWN, f"texts of the law {name}")
    places = [(method_of(r), _way(r), r.metric, r.steps) for r in own]
    for place in places:
        if places.count(place) > 1:
            method, way, metric, steps = place
            raise UserError(
                f"the law {name}: several records of {metric} for {method}, {way}, {steps} steps; keep one"
            )
    return own


def _way(record: EvalRecord) -> str:
    named = {GUMBEL: "float32 noise", CALCULATED: "float32 noise, calculated"}
    return named.get(record.sampler or "", "exact draws")


def _cells(records: Sequence[EvalRecord], metric: str) -> dict[str, Grid[int]]:
    """By the way that they were drawn."""
    found = [r for r in records if r.metric == metric]
    ways = sorted({_way(r) for r in found}, reverse=True)
    return {way: grid([r for r in found if _way(r) == way], lambda r: r.steps or 0) for way in ways}


def _noisy(records: Sequence[EvalRecord], sampler: str) -> Grid[int]:
    """Perplexities by float32 noise, drawn or calculated."""
    own = [r for r in records if r.metric == PERPLEXITY and r.sampler == sampler]
    return grid(own, lambda r: r.steps or 0)


def _own(records: Sequence[EvalRecord]) -> float:
    """The law's perplexity."""
    return records[0].details[PERPLEXITY]


def _findings(laws: dict[str, list[EvalRecord]]) -> list[Finding]:
    """In the most steps, by calculation where there is any: texts would have to be many to tell as much."""
    ways = [w for w in (CALCULATED, GUMBEL) if any(_noisy(own, w) for own in laws.values())]
    if not ways:
        return []
    drawn = {name: cells for name, own in laws.items() if (cells := _noisy(own, ways[0]))}
    most = max(n for cells in drawn.values() for n in all_steps(cells))
    told = ", calculated" if ways[0] == CALCULATED else ""

    def at(name: str, who: str) -> Estimate | None:
        if who == _THE_LAW:
            return Estimate(_own(laws[name]), 0.0)
        return drawn[name].get(who, {}).get(most)

    def tests(better: str, worse: str) -> list[Test]:
        return [
            under(name, below(better, at(name, better), worse, at(name, worse))) for name in drawn
        ]

    claim = (
        f"{TITLE} by float32 noise{told}, {most:,} steps: {MASKED}'s texts have a lower perplexity "
        "than"
    )
    theirs = paper.OWT_QUALITY.column(most) if str(most) in paper.OWT_QUALITY.columns else {}
    remark = (
        f"Of the paper's models: {theirs[MASKED]:.1f} and {theirs[MIXED]:.1f}." if theirs else ""
    )
    return [
        Finding(f"{claim} {_THE_LAW} says", "", tests(MASKED, _THE_LAW)),
        Finding(f"{claim} {MIXED}'s", "", tests(MASKED, MIXED), remark),
    ]


def _tables(records: Sequence[EvalRecord]) -> list[str]:
    first = records[0]
    of_text = f" behind {first.data}" if first.data is not None else ""
    title = (
        f"*Perplexity under the law {first.model}{of_text} "
        f"({first.details['vocabulary']:,.0f} tokens; the law's own: {_own(records):,.2f}):*"
    )
    entropies = _table(records, ENTROPY, 3)
    named = f"Entropy of each text's own tokens, nats ({first.model})"
    return [title, _table(records, PERPLEXITY, None), fold(named, entropies) if entropies else ""]


def _table(records: Sequence[EvalRecord], metric: str, digits: int | None) -> str:
    ways = _cells(records, metric)
    steps = sorted({n for cells in ways.values() for n in all_steps(cells)})
    rows = [
        [f"{method}, {way}", *(row[n].shown(digits) if n in row else "" for n in steps)]
        for way, cells in ways.items()
        for method, row in cells.items()
    ]
    return markdown_table(["sampling steps", *(f"{n:,}" for n in steps)], rows) if rows else ""


def _falls(laws: dict[str, list[EvalRecord]], exact: Grid[int]) -> list[str]:
    """What is lost from few to many steps: by calculation, in the paper, and where draws are `exact`."""
    calculated = {name: cells for name, own in laws.items() if (cells := _noisy(own, CALCULATED))}
    most = max((n for cells in calculated.values() for n in all_steps(cells)), default=0)

    def falls(row: Mapping[int, Estimate], *, logarithmic: bool = False) -> str:
        if not {FEWEST, most} <= row.keys():
            return ""
        few, many = (row[n].value for n in (FEWEST, most))
        return f"{math.log(few / many) if logarithmic else few - many:.3f}"

    methods = [m for m in paper.METHODS if m != _EXACT and any(m in c for c in calculated.values())]
    rows = [
        [
            m, *(falls(cells.get(m, {}), logarithmic=True) for cells in calculated.values()),
            falls(_ENTROPIES.get(m, {})), falls(exact.get(m, {})),
        ]
        for m in methods
    ]  # fmt: skip
    if not rows:
        return []
    heads = [
        "", *(f"log perplexity under {name}, calculated" for name in calculated),
        "entropy of texts, the paper", "entropy of texts, here, drawn exactly",
    ]  # fmt: skip
    return [f"*What is lost from {FEWEST} to {most:,} steps, nats:*", markdown_table(heads, rows)]


def _plot(laws: dict[str, list[EvalRecord]], file: Path) -> None:
    """Perplexities by float32 noise over the law's own: lines where they are calculated, points where texts
    were drawn."""
    methods = dict.fromkeys(method_of(r) for own in laws.values() for r in own)
    colours = series_colours(list(methods))

    def panel(name: str, axes: Axes) -> None:
        own = _own(laws[name])

        def over(cells: Grid[int]) -> Lines:
            return {
                method: [
                    Point(float(n), row[n].value / own, row[n].stderr / own) for n in sorted(row)
                ]
                for method, row in cells.items()
            }

        calculated, drawn = (over(_noisy(laws[name], way)) for way in (CALCULATED, GUMBEL))
        title = f"perplexity / the law's ({name})"
        draw_by_steps(axes, calculated or drawn, colours, title, None)
        if calculated:
            for method, points in drawn.items():
                x, y, errors = zip(*points, strict=True)
                axes.errorbar(
                    x, y, yerr=errors, fmt="s", markersize=6, capsize=3, color=colours[method]
                )

    save_panels(file, [partial(panel, name) for name in laws], small=True)
