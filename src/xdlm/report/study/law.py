"""Texts of a known law: what float32 noise does to each method, apart from any model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xdlm.evaluation.known_law import ENTROPY, PERPLEXITY
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
from xdlm.report.study.writing import all_steps
from xdlm.report.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Drawn from a known law"
#: What texts of one law have in common.
_ALIKE = (*ALWAYS, "temperature", "top_p", "n")
_WAYS = {True: "float32 noise", False: "exact draws"}
_ENTROPIES = by_steps(paper.OWT_ENTROPY)


def known_laws(study: Study) -> Section | None:
    if not study.law:
        return None
    laws = {name: [r for r in study.law if r.model == name] for name in _names(study.law)}
    for name, records in laws.items():
        check_alike(records, _ALIKE, f"texts of the law {name}")
    figures: dict[str, Plot] = {"law": partial(_plot, laws)}
    return Section(
        TITLE, ("tab:owt_performance",),
        [_about(), *(part for name, own in laws.items() for part in _tables(name, own))],
        _findings(laws), figures, study.law, draw_known_again(study.law),
    )  # fmt: skip


def _about() -> str:
    return (
        "No trained model and no judge: every position of these texts has a law of its own, independent of "
        "the others, and the sampler is given just that as predictions (`xdlm eval draws`). Drawn exactly, "
        "texts have the law's own perplexity under every noise and in any number of steps. What float32 "
        "noise, by which published implementations draw, makes of it is therefore the noise's doing, and "
        "part of every figure that is measured of such texts."
    )


def _findings(laws: dict[str, list[EvalRecord]]) -> list[Finding]:
    drawn = {name: _cells(own, PERPLEXITY, noisy=True) for name, own in laws.items()}
    most = max((n for cells in drawn.values() for n in all_steps(cells)), default=0)
    theirs = paper.OWT_QUALITY.column(most) if str(most) in paper.OWT_QUALITY.columns else {}

    def tests(better: str, worse: str) -> list[Test]:
        return [
            under(name, below(better, _at(drawn, name, better, most), worse,
                              Estimate(_own(laws[name]), 0.0) if worse == "the law" else
                              _at(drawn, name, worse, most)))
            for name in laws
        ]  # fmt: skip

    claim = (
        f"{TITLE} by float32 noise, {most:,} steps: {MASKED}'s texts have a lower perplexity than"
    )
    figures = f"{theirs[MASKED]:.1f} < {theirs[MIXED]:.1f}" if theirs else ""
    return [
        Finding(f"{claim} the law says", "", tests(MASKED, "the law")),
        Finding(f"{claim} {MIXED}'s", figures, tests(MASKED, MIXED)),
    ]


def _at(drawn: dict[str, Grid[int]], law: str, method: str, steps: int) -> Estimate | None:
    return drawn[law].get(method, {}).get(steps)


def _tables(name: str, records: Sequence[EvalRecord]) -> list[str]:
    tokens = int(records[0].details["vocabulary"])
    title = f"Perplexity of texts under the law {_called(records[0])} ({tokens:,} tokens; the law's own: "
    heads = sorted({r.steps for r in records if r.steps is not None})
    return [
        f"*{title}{_own(records):,.2f}):*",
        _table(records, PERPLEXITY, heads, None),
        fold(
            f"Entropy of each text's own tokens, nats ({name})", _table(records, ENTROPY, heads, 3)
        ),
    ]


def _called(record: EvalRecord) -> str:
    of_text = f" behind {record.data}" if record.data is not None else ""
    return f"{record.model}{of_text}"


def _table(
    records: Sequence[EvalRecord], metric: str, steps: Sequence[int], digits: int | None
) -> str:
    rows = []
    for noisy, way in _WAYS.items():
        for method, cells in _cells(records, metric, noisy=noisy).items():
            shown = (cells[n].shown(digits) if n in cells else "" for n in steps)
            rows.append([f"{method}, {way}", *shown])
            theirs = _ENTROPIES.get(method, {}) if metric == ENTROPY and noisy else {}
            if theirs:
                known = (f"{theirs[n].value:.3f}" if n in theirs else "" for n in steps)
                rows.append([f"{method}, the paper", *known])
    return markdown_table(["sampling steps", *(f"{n:,}" for n in steps)], rows)


def _cells(records: Sequence[EvalRecord], metric: str, *, noisy: bool) -> Grid[int]:
    """By float32 noise, or exactly."""
    drawn = [r for r in records if r.metric == metric and (r.sampler == GUMBEL) == noisy]
    return grid(drawn, lambda r: r.steps or 0)


def _own(records: Sequence[EvalRecord]) -> float:
    return records[0].details[PERPLEXITY]


def _names(records: Sequence[EvalRecord]) -> list[str]:
    return list(dict.fromkeys(r.model for r in records))


def _plot(laws: dict[str, list[EvalRecord]], file: Path) -> None:
    """Perplexities by float32 noise over the law's own."""
    methods = list(dict.fromkeys(method_of(r) for own in laws.values() for r in own))
    colours = series_colours(methods)

    def panel(name: str, axes: Axes) -> None:
        own, lines = _own(laws[name]), Lines()
        for method, cells in _cells(laws[name], PERPLEXITY, noisy=True).items():
            lines[method] = [
                Point(float(n), cells[n].value / own, cells[n].stderr / own) for n in sorted(cells)
            ]
        draw_by_steps(axes, lines, colours, f"perplexity / the law's ({name})", None)

    save_panels(file, [partial(panel, name) for name in laws], small=True)
