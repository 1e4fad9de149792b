"""Records of texts whose law is known: which belong together, and their tables."""

from __future__ import annotations

from collections.abc import Sequence

from xdlm.errors import UserError
from xdlm.evaluation.known_law import BOUND, CALCULATED, PERPLEXITY
from xdlm.evaluation.records import EvalRecord
from xdlm.report.comparison import ALWAYS, check_alike, method_of
from xdlm.report.figures import Lines, Point
from xdlm.report.study.beside import GUMBEL
from xdlm.report.study.collection import Grid, grid
from xdlm.report.study.verdict import Estimate
from xdlm.report.study.writing import all_steps
from xdlm.report.tables import markdown_table
from xdlm.sampling import STARVED

#: What records of one law have in common, and what those of texts have too.
_ALIKE, _DRAWN = (*ALWAYS, "temperature", "top_p"), ("n",)
#: How texts were drawn, or that nothing was.
EXACT, NOISY, RECKONED = "exact draws", "float32 noise", "float32 noise, calculated"
_WAYS = {GUMBEL: NOISY, STARVED: "the law of float32 noise", CALCULATED: RECKONED}

#: Records by the names of their laws.
Laws = dict[str, list[EvalRecord]]


def has_memory(record: EvalRecord) -> bool:
    """Whether the tokens of its law depend on each other: it was learned."""
    return "law" in record.config


def by_law(records: Sequence[EvalRecord]) -> Laws:
    """Refuses what does not compare, and two records in one place."""
    names = dict.fromkeys(r.model for r in records)
    return {name: _checked(name, [r for r in records if r.model == name]) for name in names}


def _checked(name: str, own: list[EvalRecord]) -> list[EvalRecord]:
    check_alike(own, ALWAYS, f"the law {name}")
    texts = [r for r in own if r.metric != BOUND]
    if not any(r.metric == PERPLEXITY and r.value is not None for r in texts):
        raise UserError(
            f"the law {name}: no record says what its texts' perplexity is ({PERPLEXITY})"
        )
    check_alike(texts, _ALIKE, f"the law {name}")
    for way in dict.fromkeys(map(way_of, texts)):
        drawn = [r for r in texts if way_of(r) == way]
        check_alike(drawn, _DRAWN, f"texts of the law {name}")
    places = [(method_of(r), way_of(r), r.metric, r.steps) for r in own]
    for place in places:
        if places.count(place) > 1:
            method, way, metric, steps = place
            raise UserError(
                f"the law {name}: several records of {metric} for {method}, {way}, {steps} steps; keep one"
            )
    return own


def way_of(record: EvalRecord) -> str:
    """How its texts were drawn."""
    return _WAYS.get(record.sampler or "", EXACT)


def cells_of(records: Sequence[EvalRecord], metric: str, way: str) -> Grid[int]:
    """By method and number of sampling steps."""
    own = [r for r in records if r.metric == metric and way_of(r) == way and r.value is not None]
    return grid(own, lambda r: r.steps or 0)


def own_perplexity(records: Sequence[EvalRecord]) -> Estimate:
    """The law's."""
    details = next(r.details for r in records if r.metric == PERPLEXITY)
    return Estimate(details[PERPLEXITY], details.get(f"{PERPLEXITY}_stderr", 0.0))


def steps_of(cells: Grid[int], *methods: str) -> list[int]:
    """Those that all of some methods were drawn in."""
    found = [set(cells.get(method, {})) for method in methods]
    return sorted(set.intersection(*found))


def heading(records: Sequence[EvalRecord]) -> str:
    """Of a table of perplexities under one law."""
    first = records[0]
    text = "of" if has_memory(first) else "behind"
    of_text = f" {text} {first.data}" if first.data is not None else ""
    return (
        f"*Perplexity under the law {first.model}{of_text} ({first.details['vocabulary']:,.0f} tokens; "
        f"the law's own: {own_perplexity(records).shown()}):*"
    )


def table_of(records: Sequence[EvalRecord], metric: str, digits: int | None = None) -> str:
    """A line for each method and way to draw; empty where there is nothing."""
    ways = sorted({way_of(r) for r in records if r.metric == metric}, reverse=True)
    cells = {way: cells_of(records, metric, way) for way in ways}
    steps = sorted({n for found in cells.values() for n in all_steps(found)})
    rows = [
        [f"{method}, {way}", *(row[n].shown(digits) if n in row else "" for n in steps)]
        for way, found in cells.items()
        for method, row in found.items()
    ]
    return markdown_table(["sampling steps", *(f"{n:,}" for n in steps)], rows) if rows else ""


def over(cells: Grid[int], own: float) -> Lines:
    """As shares of the law's own perplexity."""
    return {
        method: [Point(float(n), row[n].value / own, row[n].stderr / own) for n in sorted(row)]
        for method, row in cells.items()
    }
