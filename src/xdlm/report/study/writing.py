"""How well the methods write, by number of sampling steps and judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xdlm.report.colours import series_colours
from xdlm.report.figures import Lines, Point, draw_by_steps
from xdlm.report.plots import save_panels
from xdlm.report.study import paper
from xdlm.report.study.collection import Grid, Study
from xdlm.report.study.commands import write_again
from xdlm.report.study.crossover import crossings, plot_crossover
from xdlm.report.study.likelihood import MASKED, MIXED, ranked
from xdlm.report.study.page import Plot, Section, beside_real, by_method, missing, of_paper
from xdlm.report.study.pooling import (
    less_than_published,
    many_together,
    repeatedly,
    rule,
    written_again,
)
from xdlm.report.study.verdict import Estimate, Finding, Outcome, Test, below, under

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEWEST = 8
_STEPS = tuple(int(n) for n in paper.OWT_QUALITY.columns)


def generation(study: Study) -> Section:
    judged = {judge: study.written(judge) for judge in study.judges}
    entropy = study.written(None)
    most = _most(judged)
    parts = [crossings(judged), rule(study) if judged else ""]
    for judge, cells in judged.items():
        title = f"Perplexity under {judge} by sampling steps, lower is better"
        parts += [
            beside_real(title, study.real(judge)),
            by_method("here", _heads(cells), _texts(cells)),
            _ranks(cells, most),
        ]
    if entropy:
        table = by_method("here", _heads(entropy), _texts(entropy), digits=3, best=False)
        title = "Entropy of each text's own tokens by sampling steps, nats"
        parts += [beside_real(title, study.real(None), 3), table]
    parts += [of_paper(paper.OWT_QUALITY), of_paper(paper.OWT_ENTROPY)]
    parts += [of_paper(paper.LM1B_QUALITY, folded=True), of_paper(paper.LM1B_ENTROPY, folded=True)]
    parts += missing(["a judge"], ["a judge"] * bool(judged), "generated text")
    for judge, cells in judged.items():
        parts += missing(paper.METHODS, cells, f"texts under {judge}, step {study.step:,}")
        parts += missing(map(str, _STEPS), map(str, all_steps(cells)), f"sampling steps, {judge}")
    records = [r for r in study.last if r.metric in ("gen_ppl", "entropy")]
    figures: dict[str, Plot] = {}
    if judged:
        figures["generation"] = lambda file: _plot(study, judged, entropy, file)
        if any(map(shared, judged.values())):
            figures["crossover"] = lambda file: plot_crossover(study.methods, judged, file)
    return Section(
        "Generated text", ("tab:owt_performance", "tab:lm1b_performance"),
        parts,
        findings(judged, entropy, study.real(None), written_again(study)), figures, records,
        write_again(study, study.sources(records)),
    )  # fmt: skip


def findings(
    judged: Mapping[str, Grid[int]],
    entropy: Grid[int],
    real: Estimate | None,
    repeated: Mapping[str, Sequence[Grid[int]]],
) -> list[Finding]:
    """Few steps are judged by the texts of one training, many by those `repeated` in others too."""
    few, many = _few(judged, entropy, real), _many(judged, entropy, real, repeated)
    most = _most(judged)
    together = many_together(judged, repeated)
    if many.outcome in (Outcome.HOLDS, Outcome.UNKNOWN) or most not in _STEPS:
        return [few, many, together]
    return [few, many, together, less_than_published(judged, repeated, most)]


def _most(judged: Mapping[str, Grid[int]]) -> int:
    return max((n for cells in judged.values() for n in shared(cells)), default=_STEPS[-1])


def _few(judged: Mapping[str, Grid[int]], entropy: Grid[int], real: Estimate | None) -> Finding:
    theirs = paper.OWT_QUALITY.column(FEWEST)
    return Finding(
        f"{FEWEST} sampling steps: {MIXED} writes better than {MASKED}",
        f"{theirs[MIXED]:.1f} < {theirs[MASKED]:.1f}",
        compared(judged, MIXED, MASKED, FEWEST),
        entropies(entropy, real, MIXED, MASKED, FEWEST),
    )


def _many(
    judged: Mapping[str, Grid[int]],
    entropy: Grid[int],
    real: Estimate | None,
    repeated: Mapping[str, Sequence[Grid[int]]],
) -> Finding:
    most = _most(judged)
    steps = most if most in _STEPS else _STEPS[-1]
    theirs = paper.OWT_QUALITY.column(steps)
    return Finding(
        f"{most:,} sampling steps, drawn exactly: {MASKED} writes better than {MIXED}",
        f"{theirs[MASKED]:.1f} < {theirs[MIXED]:.1f}",
        [
            under(judge, repeatedly(cells, repeated.get(judge, []), most))
            for judge, cells in judged.items()
        ],
        entropies(entropy, real, MASKED, MIXED, most),
    )


def compared(judged: Mapping[str, Grid[int]], better: str, worse: str, steps: int) -> list[Test]:
    """Whether one model's texts are better than another's, by each judge."""
    tests = []
    for judge, cells in judged.items():
        one, other = (cells.get(name, {}).get(steps) for name in (better, worse))
        tests.append(under(judge, below(better, one, worse, other)))
    return tests


def entropies(cells: Grid[int], real: Estimate | None, one: str, other: str, steps: int) -> str:
    """What belongs beside a perplexity: texts that repeat themselves have a low one."""
    pair = [cells.get(name, {}).get(steps) for name in (one, other)]
    if pair[0] is None or pair[1] is None:
        return "Their entropy was not measured."
    text = "" if real is None else f" (real text: {real.value:.3f})"
    return f"Entropy: {pair[0].shown(3)} against {pair[1].shown(3)}{text}."


def numbers_of_texts(study: Study, judge: str, steps: Iterable[int]) -> list[str]:
    """For a line of a table: how many a judge has read, of each number of steps."""
    counts = {r.steps: r.n for r in study.of("gen_ppl", judge=judge)}
    return [f"{counts[n]:,}" if n in counts else "" for n in steps]


def all_steps(cells: Grid[int]) -> list[int]:
    return sorted({steps for row in cells.values() for steps in row})


def shared(cells: Grid[int]) -> set[int]:
    """Numbers of steps of both models that findings are about."""
    return set(cells.get(MASKED, ())) & set(cells.get(MIXED, ()))


def _ranks(cells: Grid[int], most: int) -> str:
    lines = []
    for steps in dict.fromkeys((FEWEST, most)):
        column = {name: row[steps] for name, row in cells.items() if steps in row}
        if order := ranked(column, paper.OWT_QUALITY.column(steps)):
            lines.append(f"{steps:,} steps: {order[0].lower()}{order[1:]}")
    return "  \n".join(lines)


def _heads(cells: Grid[int]) -> list[str]:
    return [str(steps) for steps in all_steps(cells)]


def _texts(cells: Grid[int]) -> dict[str, dict[str, Estimate]]:
    return {name: {str(n): found for n, found in row.items()} for name, row in cells.items()}


def lines(cells: Grid[int]) -> Lines:
    """What can be drawn of it."""
    drawn = {
        name: [
            Point(float(n), row[n].value, row[n].stderr)
            for n in sorted(row)
            if math.isfinite(row[n].value)
        ]
        for name, row in cells.items()
    }
    return {name: points for name, points in drawn.items() if points}


def _plot(study: Study, judged: Mapping[str, Grid[int]], entropy: Grid[int], file: Path) -> None:
    colours = series_colours(study.methods)

    def panel(cells: Grid[int], name: str, level: float | None = None) -> Callable[[Axes], None]:
        return lambda axes: draw_by_steps(axes, lines(cells), colours, name, level)

    # Real text is told, not drawn: so far below the methods that they would lie on each other.
    panels = [
        panel(cells, f"perplexity ({judge}{'' if real is None else f'; real text: {real.plain()}'})")
        for judge, cells in judged.items() for real in [study.real(judge)]
    ]  # fmt: skip
    if entropy:
        real = study.real(None)
        panels.append(panel(entropy, "entropy, nats", None if real is None else real.value))
    save_panels(file, panels, small=True)
