"""Texts of a known law: what float32 noise does to each method, apart from any model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xdlm.evaluation.known_law import ENTROPY, PERPLEXITY
from xdlm.evaluation.records import EvalRecord
from xdlm.report.colours import series_colours
from xdlm.report.comparison import method_of
from xdlm.report.figures import draw_by_steps
from xdlm.report.plots import save_panels
from xdlm.report.study import paper
from xdlm.report.study.collection import Grid, Study
from xdlm.report.study.commands import draw_known_again
from xdlm.report.study.crossover import by_steps
from xdlm.report.study.law_texts import (
    NOISY,
    RECKONED,
    Laws,
    by_law,
    cells_of,
    has_memory,
    heading,
    over,
    own_perplexity,
    table_of,
)
from xdlm.report.study.likelihood import MASKED, MIXED
from xdlm.report.study.page import Plot, Section, fold
from xdlm.report.study.verdict import Estimate, Finding, Test, below, under
from xdlm.report.study.writing import FEWEST, all_steps
from xdlm.report.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Drawn from a known law"
_THE_LAW = "the law"
#: Drawn by float64 noise in published code, so that its texts are no others.
_EXACT = "UDLM"
_ENTROPIES = by_steps(paper.OWT_ENTROPY)


def known_laws(study: Study) -> Section | None:
    records = [r for r in study.law if not has_memory(r)]
    if not records:
        return None
    laws = by_law(records)
    figures: dict[str, Plot] = {"law": partial(_plot, laws)}
    tables = [part for own in laws.values() for part in _tables(own)]
    return Section(
        TITLE, ("tab:owt_performance",), [_ABOUT, *tables, *_falls(laws, study.written(None))],
        _findings(laws), figures, records, draw_known_again(records), aside=True,
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


def _under(laws: Laws, way: str) -> dict[str, Grid[int]]:
    """Perplexities of texts that were drawn in one way, by law."""
    return {name: cells_of(own, PERPLEXITY, way) for name, own in laws.items()}


def _findings(laws: Laws) -> list[Finding]:
    """In the most steps, by calculation where there is any: texts would have to be many to tell as much."""
    ways = [way for way in (RECKONED, NOISY) if any(_under(laws, way).values())]
    if not ways:
        return []
    drawn = {name: cells for name, cells in _under(laws, ways[0]).items() if cells}
    most = max(n for cells in drawn.values() for n in all_steps(cells))
    told = ways[0].removeprefix(NOISY)

    def at(name: str, who: str) -> Estimate | None:
        if who == _THE_LAW:
            return own_perplexity(laws[name])
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
    entropies = table_of(records, ENTROPY, 3)
    named = f"Entropy of each text's own tokens, nats ({records[0].model})"
    return [
        heading(records), table_of(records, PERPLEXITY), fold(named, entropies) if entropies else ""
    ]  # fmt: skip


def _falls(laws: Laws, exact: Grid[int]) -> list[str]:
    """What is lost from few to many steps: by calculation, in the paper, and where draws are `exact`."""
    calculated = {name: cells for name, cells in _under(laws, RECKONED).items() if cells}
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


def _plot(laws: Laws, file: Path) -> None:
    """Perplexities by float32 noise over the law's own: lines where they are calculated, points where texts
    were drawn."""
    methods = dict.fromkeys(method_of(r) for own in laws.values() for r in own)
    colours = series_colours(list(methods))

    def panel(name: str, axes: Axes) -> None:
        own = own_perplexity(laws[name]).value
        ways = (cells_of(laws[name], PERPLEXITY, way) for way in (RECKONED, NOISY))
        calculated, drawn = (over(cells, own) for cells in ways)
        title = f"perplexity / the law's ({name})"
        draw_by_steps(axes, calculated or drawn, colours, title, None)
        if calculated:
            for method, points in drawn.items():
                x, y, errors = zip(*points, strict=True)
                axes.errorbar(
                    x, y, yerr=errors, fmt="s", markersize=6, capsize=3, color=colours[method]
                )

    save_panels(file, [partial(panel, name) for name in laws], small=True)
