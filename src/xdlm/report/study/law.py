"""Texts of a known law: what float32 noise does to each method, apart from any model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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
from xdlm.report.study.verdict import Estimate, Finding, Test, agreement, below, under
from xdlm.report.study.writing import FEWEST, all_steps
from xdlm.report.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Drawn from a known law"
#: What records of one law have in common, and what those of texts have too.
_ALIKE, _DRAWN = (*ALWAYS, "temperature", "top_p"), ("n",)
_THE_LAW = "the law"
_ENTROPIES = by_steps(paper.OWT_ENTROPY)


def known_laws(study: Study) -> Section | None:
    if not study.law:
        return None
    laws = {name: _checked(name, study.law) for name in dict.fromkeys(r.model for r in study.law)}
    figures: dict[str, Plot] = {"law": partial(_plot, laws)}
    return Section(
        TITLE, ("tab:owt_performance",),
        [_ABOUT, *(part for own in laws.values() for part in _tables(own)), *_falls(laws)],
        _findings(laws), figures, study.law, draw_known_again(study.law),
    )  # fmt: skip


_ABOUT = (
    "No trained model and no judge: every position of these texts has a law of its own, independent of the "
    "others, and the sampler is given just that as predictions (`xdlm eval draws`). Drawn exactly, texts "
    "have the law's own perplexity under every noise and in any number of steps. What float32 noise, by "
    "which published implementations draw, makes of it is therefore the noise's doing, and part of every "
    "figure that is measured of such texts. It can also be calculated (`--calculate`), without chance."
)


def _checked(name: str, records: Sequence[EvalRecord]) -> list[EvalRecord]:
    own = [r for r in records if r.model == name]
    check_alike(own, _ALIKE, f"the law {name}")
    check_alike([r for r in own if r.sampler != CALCULATED], _DRAWN, f"texts of the law {name}")
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
    """Of texts that were drawn, in the most steps."""
    drawn = {name: cells for name, own in laws.items() if (cells := _noisy(own, GUMBEL))}
    most = max((n for cells in drawn.values() for n in all_steps(cells)), default=0)

    def at(name: str, who: str) -> Estimate | None:
        if who == _THE_LAW:
            return Estimate(_own(laws[name]), 0.0)
        return drawn[name].get(who, {}).get(most)

    def tests(better: str, worse: str) -> list[Test]:
        return [
            under(name, below(better, at(name, better), worse, at(name, worse))) for name in drawn
        ]

    theirs = paper.OWT_QUALITY.column(most) if str(most) in paper.OWT_QUALITY.columns else {}
    figures = f"{theirs[MASKED]:.1f} < {theirs[MIXED]:.1f}" if theirs else ""
    claim = (
        f"{TITLE} by float32 noise, {most:,} steps: {MASKED}'s texts have a lower perplexity than"
    )
    if not drawn:
        return []
    return [
        Finding(f"{claim} {_THE_LAW} says", "", tests(MASKED, _THE_LAW)),
        Finding(f"{claim} {MIXED}'s", figures, tests(MASKED, MIXED)),
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
        [f"{method}, {way}", *(_shown(row[n], digits) if n in row else "" for n in steps)]
        for way, cells in ways.items()
        for method, row in cells.items()
    ]
    return markdown_table(["sampling steps", *(f"{n:,}" for n in steps)], rows) if rows else ""


def _shown(found: Estimate, digits: int | None) -> str:
    """What is calculated has no error."""
    return found.shown(digits) if found.stderr else f"{found.value:,.2f}"


def _falls(laws: dict[str, list[EvalRecord]]) -> list[str]:
    """Beside the paper's own texts: what is lost from few to many steps, by calculation."""
    calculated = {name: cells for name, own in laws.items() if (cells := _noisy(own, CALCULATED))}
    most = max((n for cells in calculated.values() for n in all_steps(cells)), default=0)
    falls = {
        name: {
            method: math.log(row[FEWEST].value / row[most].value)
            for method, row in cells.items() if {FEWEST, most} <= row.keys()
        }
        for name, cells in calculated.items()
    }  # fmt: skip
    theirs = {
        method: row[FEWEST].value - row[most].value
        for method, row in _ENTROPIES.items() if {FEWEST, most} <= row.keys()
    }  # fmt: skip
    methods = [m for m in paper.METHODS if m in theirs and all(m in own for own in falls.values())]
    if not falls or len(methods) < 3:
        return []
    rows = [[m, *(f"{own[m]:.3f}" for own in falls.values()), f"{theirs[m]:.3f}"] for m in methods]
    order = " and ".join(
        f"{agreement([own[m] for m in methods], [theirs[m] for m in methods]):.2f} ({name})"
        for name, own in falls.items()
    )
    title = f"What a text loses from {FEWEST} to {most:,} steps, nats"
    heads = [
        "",
        *(f"of perplexity under {name}, calculated" for name in falls),
        "of entropy in the paper",
    ]
    return [
        f"*{title}:*",
        markdown_table(heads, rows),
        f"Kendall's τ between what is calculated and the paper's falls: {order}.",
    ]


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
