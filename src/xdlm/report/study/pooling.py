"""Masked against mixed noise over several numbers of sampling steps, and over two trainings.

Averaged are differences of log perplexity under one judge, log(mixed / masked), with weights 1 / se^2
(`verdict.pooled`), and not perplexities: those of a judge that was trained again too compare among
themselves alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

from xdlm.report.study import paper
from xdlm.report.study.collection import Grid, Study
from xdlm.report.study.course import gaps
from xdlm.report.study.likelihood import MASKED, MIXED
from xdlm.report.study.page import as_share, listed, percent
from xdlm.report.study.verdict import (
    Finding,
    Test,
    below,
    pooled,
    positive,
    under,
    unmeasured,
)

#: Numbers of steps from which on the paper finds masked noise well ahead.
MANY = (256, 512, 1024)
#: Who agrees to this share about real text is one judge, whatever form its weights are kept in.
_EQUAL = 1e-4


def rule(study: Study) -> str:
    """How figures are put together, in a sentence."""
    more = "" if study.again is None else ", and those of both trainings,"
    return (
        f"{listed(MANY)} steps{more} are judged together by the mean of log({MIXED} / {MASKED}), each "
        "weighted by the inverse of its squared error: such texts are independent, and a judge is compared "
        "with nobody but itself."
    )


def is_same_judge(study: Study, judge: str, other: str) -> bool:
    """Whether the `other` judge, of methods that were trained again, is the one from before: by its files,
    or by what it says of real text if it was not trained here."""
    assert study.again is not None
    digests = [
        {r.judge_sha256 for r in one.last if r.judge == name}
        for one, name in ((study, judge), (study.again, other))
    ]
    if digests[0] == digests[1]:
        return True
    own = {PurePosixPath(r.model).name for one in (study, study.again) for r in one.reference}
    before, after = study.real(judge), study.again.real(other)
    if before is None or after is None or own & {judge, other}:
        return False
    return math.isclose(before.value, after.value, rel_tol=_EQUAL)


def judges_again(study: Study) -> dict[str, str]:
    """For each judge who it was when methods were trained again: the same, or one of the same name, which
    was then trained again too."""
    found = {}
    for judge in study.judges if study.again is not None else ():
        assert study.again is not None
        same = [other for other in study.again.judges if is_same_judge(study, judge, other)]
        named = [other for other in study.again.judges if other == judge]
        if same or named:
            found[judge] = (same or named)[0]
    return found


def written_again(study: Study) -> dict[str, Grid[int]]:
    """Texts of methods that were trained again, by the judges' names before."""
    if study.again is None:
        return {}
    return {judge: study.again.written(other) for judge, other in judges_again(study).items()}


def twice(cells: Grid[int], repeated: Grid[int], steps: int) -> Test:
    """Whether masked noise writes better in so many steps, by both trainings where there are two."""
    pairs = [
        [one.get(name, {}).get(steps) for name in (MASKED, MIXED)] for one in (cells, repeated)
    ]
    (a, b), (c, d) = pairs
    both = [gap for one in (cells, repeated) if (gap := gaps(one).get(steps)) is not None]
    if len(both) < 2 or a is None or b is None or c is None or d is None:
        return below(MASKED, a, MIXED, b)
    mean = pooled(both)
    words = (
        f"{MASKED} {a.shown()}, {MIXED} {b.shown()}, trained again {c.shown()} and {d.shown()}, "
        f"together {as_share(mean)}"
    )
    brief = (
        f"{a.plain()} and {b.plain()}, again {c.plain()} and {d.plain()}, together "
        f"{percent(math.expm1(mean.value))}"
    )
    return positive(mean, words, brief)


def many_together(judged: Mapping[str, Grid[int]], repeated: Mapping[str, Grid[int]]) -> Finding:
    """Whether masked noise writes better in many steps, whatever their number."""
    theirs = (paper.OWT_QUALITY.column(steps) for steps in MANY)
    return Finding(
        f"{listed(MANY)} sampling steps together: {MASKED} writes better than {MIXED}",
        ", ".join(f"{column[MASKED]:.1f} < {column[MIXED]:.1f}" for column in theirs),
        [
            under(judge, _over([cells, repeated.get(judge, {})], MANY))
            for judge, cells in judged.items()
        ],
    )


def _over(trainings: Sequence[Grid[int]], steps: Collection[int]) -> Test:
    found = [(n, gap) for one in trainings for n, gap in gaps(one).items() if n in steps]
    if not found:
        return unmeasured(f"{MIXED} and {MASKED}")
    mean = pooled([gap for _, gap in found])
    where = listed(sorted({n for n, _ in found}))
    words = f"{MIXED} {as_share(mean)} from {MASKED} over {where} steps"
    return positive(mean, words, percent(math.expm1(mean.value)))
