"""Studies of the same methods under another recipe: other weights of the loss, more steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xdlm.evaluation.perplexity import ZERO_SHOT_MEAN
from xdlm.report.comparison import method_of
from xdlm.report.study.collection import Study
from xdlm.report.study.course import gaps
from xdlm.report.study.likelihood import MASKED, MIXED
from xdlm.report.study.page import Section, as_share, percent
from xdlm.report.study.pooling import MANY, over_trainings
from xdlm.report.study.verdict import Estimate, Finding, Test, difference, logarithm, positive
from xdlm.report.study.writing import FEWEST
from xdlm.report.tables import markdown_table

TITLE = "Trained otherwise"


class Recipe(NamedTuple):
    """What sets a study apart: the loss's weights, the training steps, and the tokens seen in them."""

    study: Study
    weighting: str
    steps: int
    tokens: int

    @property
    def cells(self) -> list[str]:
        return [f"`{self.weighting}`", f"{self.steps:,}", f"{self.tokens / 1e6:.1f} M"]


def trained_otherwise(study: Study) -> Section | None:
    if not study.otherwise:
        return None
    recipes = sorted(_recipes(study), key=lambda one: (one.weighting, one.steps))
    parts = [_ABOUT, *(_read(recipes, data, study) for data in (study.validation, ZERO_SHOT_MEAN))]
    parts += [_written(recipes)]
    shown = {None, FEWEST, *MANY}
    records = [
        r for one in study.otherwise.values() for r in one.last
        if r.metric in ("ppl", "gen_ppl") and r.steps in shown
    ]  # fmt: skip
    return Section(TITLE, (), parts, _longer(recipes, study), records=records)


_ABOUT = (
    "The same methods, model and data under the weights of their bounds (`loss.weighting: elbo` in the "
    "recipes; GIDD's own are `dynamic`) where this study has `dynamic` for all, and for more steps. Where "
    "rows of text were not kept one by one, errors take models for independent, although they read the "
    "same: such differences are surer than they say. None of it enters the means over trainings above. "
    "They are trained by the same recipes with that setting, and `train.steps`, changed."
)


def _recipes(study: Study) -> Iterator[Recipe]:
    for one in (study, *study.otherwise.values()):
        config = next((r.config for r in one.last if method_of(r) == MASKED), None)
        if config is None:  # there is nothing to set the others against
            continue
        batch = config["train"]["batch"] * config["data"]["length"]
        yield Recipe(one, config["loss"]["weighting"], one.step, one.step * batch)


def _gap(one: Study, data: str | None, method: str) -> Estimate | None:
    """log(method / masked)."""
    found = one.perplexities(data)
    if not {method, MASKED} <= found.keys():
        return None
    return difference(logarithm(found[method]), logarithm(found[MASKED]))


def _read(recipes: Sequence[Recipe], data: str | None, study: Study) -> str:
    others = [m for m in study.methods if m != MASKED and any(
        m in one.study.perplexities(data) for one in recipes if one.study is not study)]  # fmt: skip
    rows = []
    for one in recipes:
        found = one.study.perplexities(data)
        shares = (_gap(one.study, data, method) for method in others)
        cells = ["" if gap is None else as_share(gap) for gap in shares]
        rows.append([*one.cells, found[MASKED].shown() if MASKED in found else "", *cells])
    what = "mean zero-shot perplexity" if data == ZERO_SHOT_MEAN else f"perplexity of {data}"
    heads = ["weights", "steps", "tokens", MASKED, *(f"{method} against it" for method in others)]
    return f"*{what[0].upper()}{what[1:]}:*\n\n{markdown_table(heads, rows)}"


def _written(recipes: Sequence[Recipe]) -> str:
    """Gaps in generated text, in few steps and many, where there is any."""
    rows = []
    for one in recipes:
        for judge in one.study.judges:
            cells = one.study.written(judge)
            few, many = gaps(cells).get(FEWEST), over_trainings([cells], MANY)
            if few is not None and many is not None:
                rows.append([*one.cells, judge, as_share(few), as_share(many)])
    heads = ["weights", "steps", "tokens", "judge", f"{FEWEST} sampling steps",
             f"{', '.join(f'{n:,}' for n in MANY)} together"]  # fmt: skip
    title = f"*{MIXED} against {MASKED} in generated text, drawn exactly:*"
    return f"{title}\n\n{markdown_table(heads, rows)}" if rows else ""


def _longer(recipes: Sequence[Recipe], study: Study) -> list[Finding]:
    """Whether the gap in likelihood is smaller after more steps of the same recipe."""
    found = []
    for weighting in dict.fromkeys(one.weighting for one in recipes):
        own = [one for one in recipes if one.weighting == weighting]
        if len(own) > 1 and own[0].tokens < own[-1].tokens:
            tests = [_shrinks(own[0], own[-1], data) for data in (study.validation, ZERO_SHOT_MEAN)]
            claim = f"the gap from {MASKED} to {MIXED} is smaller after {own[-1].tokens / 1e6:.0f} M tokens"
            found.append(
                Finding(
                    f"Under the weights `{weighting}`: {claim} than after {own[0].tokens / 1e6:.0f} M",
                    "",
                    tests,
                )
            )
    return found


def _shrinks(first: Recipe, last: Recipe, data: str | None) -> Test:
    name = "zero-shot" if data == ZERO_SHOT_MEAN else "validation"
    both = [_gap(one.study, data, MIXED) for one in (first, last)]
    before, after = (Estimate(math.nan, math.nan) if gap is None else gap for gap in both)
    words = f"{name} {as_share(before)} to {as_share(after)}"
    brief = f"{name} {percent(math.expm1(before.value))} to {percent(math.expm1(after.value))}"
    return positive(difference(before, after), words, brief)
