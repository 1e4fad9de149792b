"""How well the methods predict text: of the kind they were trained on, and of others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from xdlm.evaluation.perplexity import ZERO_SHOT_MEAN
from xdlm.evaluation.records import EvalRecord
from xdlm.report.study import paper
from xdlm.report.study.collection import Study, grid
from xdlm.report.study.commands import read_again
from xdlm.report.study.page import Section, by_method, missing, of_paper, percent
from xdlm.report.study.verdict import Estimate, Finding, agreement, below, estimate
from xdlm.report.tables import markdown_table

MASKED, MIXED, UNIFORM = "MDLM", "XDLM k=0.1", "UDLM"
#: With a `p_uniform` of 0.1 here, which is 0 in the paper's published code: masked noise, but for its loss.
OTHER = "GIDD"


def validation(study: Study) -> Section:
    found = study.perplexities(study.validation)
    theirs = paper.VALIDATION.column("PPL")
    finding = _ordering("Validation perplexity", found, theirs)
    rows = [
        [
            method,
            found[method].shown() if method in found else "",
            _beside(found[method].value, found.get(MASKED)) if method in found else "",
            paper.VALIDATION.rows[method][0] if method in theirs else "",
            percent(theirs[method] / theirs[MASKED] - 1) if method in theirs else "",
        ]
        for method in dict.fromkeys([*paper.METHODS, *found])
    ]
    columns = ["", "here", "against MDLM", "paper", "against MDLM"]
    records = study.of("ppl", data=study.validation)
    text = f"Upper bounds on perplexity of {study.validation}, lower is better." if found else ""
    return Section(
        "Validation perplexity", ("tab:app_owt_valppl",),
        [
            " ".join(filter(None, [text, ranked(found, theirs), _exact(study, study.validation)])),
            markdown_table(columns, rows),
            *missing(paper.METHODS, found, f"at step {study.step:,}"),
        ],
        [finding], records=records, command=read_again(study.sources(records)),
    )  # fmt: skip


def zero_shot(study: Study) -> Section:
    sets = paper.ZERO_SHOT.columns
    records = [r for r in study.of("ppl") if r.data in sets]
    cells = grid(records, lambda r: str(r.data))
    means = study.perplexities(ZERO_SHOT_MEAN)
    finding = _ordering(
        "Mean zero-shot perplexity of seven sets", means, paper.ZERO_SHOT.column(ZERO_SHOT_MEAN)
    )
    there = [name for name in sets if any(name in row for row in cells.values())]
    order = ranked(means, paper.ZERO_SHOT.column(ZERO_SHOT_MEAN))
    parts = [f"{order} {_exact(study, ZERO_SHOT_MEAN)}".strip()]
    if cells:
        parts.append(by_method("here", there, cells))
    parts.append(of_paper(paper.ZERO_SHOT))
    parts += missing(paper.METHODS, means, f"mean at step {study.step:,}")
    parts += missing(sets, there, "sets")
    return Section(
        "Zero-shot perplexity", ("tab:app_owt_zsppl",), parts, [finding], records=records,
        command=read_again(study.sources(records)),
    )  # fmt: skip


def _exact(study: Study, data: str | None) -> str:
    """What an autoregressive model makes of the same text."""
    last = reference(study, data)
    if last is None:
        return ""
    name = PurePosixPath(last.model).name
    return f"For comparison, {estimate(last).shown()} for the autoregressive {name}, exact and no bound."


def reference(study: Study, data: str | None) -> EvalRecord | None:
    """The perplexity of an autoregressive model at its end."""
    own = [r for r in study.reference if r.metric == "ppl" and r.data == data]
    return max(own, key=lambda r: r.step, default=None)


def _ordering(what: str, found: Mapping[str, Estimate], theirs: Mapping[str, float]) -> Finding:
    """Masked noise predicts best, uniform noise worst, and a tenth of it lies between."""
    a, b, c = (found.get(method) for method in (MASKED, MIXED, UNIFORM))
    remark = ""
    if a and b and c:
        remark = (
            f"{MIXED} is {percent(b.value / a.value - 1)} from {MASKED} (paper: "
            f"{percent(theirs[MIXED] / theirs[MASKED] - 1)}), {UNIFORM} "
            f"{percent(c.value / b.value - 1)} from {MIXED} (paper: "
            f"{percent(theirs[UNIFORM] / theirs[MIXED] - 1)})."
        )
    return Finding(
        f"{what}: {MASKED} ≤ {MIXED} < {UNIFORM}",
        f"{theirs[MASKED]:.3f}, {theirs[MIXED]:.3f}, {theirs[UNIFORM]:.3f}",
        [below(MASKED, a, MIXED, b), below(MIXED, b, UNIFORM, c)],
        remark,
    )


def _beside(value: float, base: Estimate | None) -> str:
    return "" if base is None else percent(value / base.value - 1)


def ranked(found: Mapping[str, Estimate], theirs: Mapping[str, float]) -> str:
    """Both orders in a sentence."""
    both = [method for method in found if method in theirs]
    if len(both) < 2:
        return ""
    order = sorted(both, key=lambda method: found[method].value)
    published = sorted(both, key=lambda method: theirs[method])
    if order == published:
        return f"From best to worst, here as in the paper: {', '.join(order)}."

    def tau(methods: list[str]) -> str:
        return f"{agreement([found[m].value for m in methods], [theirs[m] for m in methods]):.2f}"

    same = [method for method in both if method != OTHER]
    without = (
        f", {tau(same)} without {OTHER}, another process there"
        if OTHER in both and len(same) > 1
        else ""
    )
    return (
        f"From best to worst here: {', '.join(order)}; in the paper: {', '.join(published)} "
        f"(Kendall's τ {tau(both)}{without})."
    )
