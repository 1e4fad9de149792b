"""Masked against mixed noise over several numbers of sampling steps, and over several trainings.

Averaged are differences of log perplexity under one judge, log(mixed / masked), and not perplexities:
those of a judge that was trained again too compare among themselves alone. Within a training texts are
independent (`verdict.pooled`); trainings differ by more than their texts tell (`verdict.across`).
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
    Estimate,
    Finding,
    Test,
    across,
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
    said = (
        f"{listed(MANY)} steps are judged together by the mean of log({MIXED} / {MASKED}), each weighted "
        "by the inverse of its squared error: such texts are independent, and a judge is compared with "
        "nobody but itself."
    )
    more = (
        " Over several trainings the mean allows for how much these differ beyond the errors of their "
        "texts (random effects, DerSimonian and Laird 1986). Of so few trainings that is a rough guess: if "
        "there is no difference, two such errors are exceeded in about one case of six."
    )
    return said + (more if other_trainings(study) else "")


def other_trainings(study: Study) -> list[Study]:
    """Of some of the methods, with texts that were drawn exactly as the first one's."""
    drawn = None if study.drawn is None else study.drawn.exact
    return [other for other in (study.again, drawn) if other is not None]


def is_same_judge(study: Study, judge: str, again: Study, other: str) -> bool:
    """Whether the `other` judge, of methods that were trained again, is the one from before: by its files,
    or by what it says of real text if it was not trained here."""
    digests = [
        {r.judge_sha256 for r in one.last if r.judge == name}
        for one, name in ((study, judge), (again, other))
    ]
    if digests[0] == digests[1]:
        return True
    own = {PurePosixPath(r.model).name for one in (study, again) for r in one.reference}
    before, after = study.real(judge), again.real(other)
    if before is None or after is None or own & {judge, other}:
        return False
    return math.isclose(before.value, after.value, rel_tol=_EQUAL)


def judges_again(study: Study, again: Study) -> dict[str, str]:
    """For each judge who it was when methods were trained again: the same, or one of the same name, which
    was then trained again too."""
    found = {}
    for judge in study.judges:
        same = [other for other in again.judges if is_same_judge(study, judge, again, other)]
        named = [other for other in again.judges if other == judge]
        if same or named:
            found[judge] = (same or named)[0]
    return found


def written_again(study: Study) -> dict[str, list[Grid[int]]]:
    """Texts of each other training, by the judges' names in the first."""
    found: dict[str, list[Grid[int]]] = {}
    for again in other_trainings(study):
        for judge, other in judges_again(study, again).items():
            found.setdefault(judge, []).append(again.written(other))
    return found


def repeatedly(cells: Grid[int], repeated: Sequence[Grid[int]], steps: int) -> Test:
    """Whether masked noise writes better in so many steps, by all trainings where there are several."""
    first, *others = (
        [one.get(name, {}).get(steps) for name in (MASKED, MIXED)] for one in (cells, *repeated)
    )
    whole = [pair for pair in others if None not in pair]
    mean = over_trainings([cells, *repeated], [steps])
    if None in first or not whole or mean is None:
        return below(MASKED, first[0], MIXED, first[1])
    count = f"all {1 + len(whole)} trainings"
    (a, b), *more = [[e for e in pair if e is not None] for pair in (first, *whole)]
    words = ", ".join([
        f"{MASKED} {a.shown()}, {MIXED} {b.shown()}",
        "trained again " + ", then ".join(f"{c.shown()} and {d.shown()}" for c, d in more),
        f"over {count} {MIXED} {as_share(mean)} from {MASKED}",
    ])  # fmt: skip
    brief = ", ".join([
        f"{a.plain()} and {b.plain()}",
        "again " + ", then ".join(f"{c.plain()} and {d.plain()}" for c, d in more),
        f"over {count} {as_share(mean)}",
    ])  # fmt: skip
    return positive(mean, words, brief)


def many_together(
    judged: Mapping[str, Grid[int]], repeated: Mapping[str, Sequence[Grid[int]]]
) -> Finding:
    """Whether masked noise writes better in many steps, whatever their number."""
    theirs = [paper.OWT_QUALITY.column(steps) for steps in MANY]
    return Finding(
        f"{listed(MANY)} sampling steps together, drawn exactly: {MASKED} writes better than {MIXED}",
        ", ".join(f"{column[MASKED]:.1f} < {column[MIXED]:.1f}" for column in theirs),
        [
            under(judge, _over([cells, *repeated.get(judge, [])], MANY))
            for judge, cells in judged.items()
        ],
    )


def less_than_published(
    judged: Mapping[str, Grid[int]], repeated: Mapping[str, Sequence[Grid[int]]], steps: int
) -> Finding:
    """Whether a lead of masked noise as large as the paper's can be excluded."""
    theirs = paper.OWT_QUALITY.column(steps)
    lead = math.log(theirs[MIXED] / theirs[MASKED])
    claim = f"{MASKED}'s lead over {MIXED} is smaller than the paper's"
    return Finding(
        f"{steps:,} sampling steps, drawn exactly: {claim}",
        percent(math.expm1(lead)),
        [
            under(judge, _smaller(over_trainings([cells, *repeated.get(judge, [])], [steps]), lead))
            for judge, cells in judged.items()
        ],
    )


def _smaller(gap: Estimate | None, lead: float) -> Test:
    if gap is None:
        return unmeasured(f"{MIXED} and {MASKED}")
    return positive(Estimate(lead - gap.value, gap.stderr), as_share(gap), as_share(gap))


def over_trainings(trainings: Sequence[Grid[int]], steps: Collection[int]) -> Estimate | None:
    """log(mixed / masked) over some numbers of steps of each training, then over these."""
    found = [[gap for n, gap in gaps(one).items() if n in steps] for one in trainings]
    return across([pooled(own) for own in found if own]) if any(found) else None


def _over(trainings: Sequence[Grid[int]], steps: Collection[int]) -> Test:
    mean = over_trainings(trainings, steps)
    if mean is None:
        return unmeasured(f"{MIXED} and {MASKED}")
    where = listed(sorted({n for one in trainings for n in gaps(one) if n in steps}))
    words = f"{MIXED} {as_share(mean)} from {MASKED} over {where} steps"
    return positive(mean, words, as_share(mean))
