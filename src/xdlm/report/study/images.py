"""How well the methods paint: pixels of CIFAR-10 beside the paper's, and codes beside its ImageNet."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xdlm.errors import UserError
from xdlm.evaluation.records import EvalRecord
from xdlm.report.comparison import PAINTED, check_alike, method_of
from xdlm.report.study import paper
from xdlm.report.study.collection import Grid, Study, grid, ordered
from xdlm.report.study.commands import is_coded, paint_again, train_images_again
from xdlm.report.study.likelihood import MASKED, MIXED, UNIFORM, ranked
from xdlm.report.study.page import Section, by_method, fold, missing, of_paper
from xdlm.report.study.paper import PaperTable
from xdlm.report.study.trained import alike, painting_took
from xdlm.report.study.verdict import Finding, below, estimate

#: What must agree between all images of a table.
_ALIKE = ("dtype", "weights", "n", "data_sha256", "judge_sha256", "guidance_schedule", "temperature",
          "top_p", "length")  # fmt: skip
#: A larger share of uniform noise.
MORE = "XDLM k=0.5"
#: How the script of the study calls its pictures, and what grids and strips show.
_PICTURE = re.compile(
    r"(?:^|/)(?P<kind>pixels|codes)-(?P<steps>\d+)-steps-guidance-(?P<scale>[\d.]+)(?P<strip>-strip)?\.png$"
)
_SHOWS = (
    "Samples of {steps} steps under guidance {scale}, a class in each column, the same seed for all:",
    "How the first of them came about ({steps} steps, guidance {scale}); below each row, what tokens did "
    "since the state before:",
)
_SCALES = {1.0: "without guidance", 2.0: "under guidance 2"}


def pixel_images(study: Study) -> Section | None:
    records = _of(study, coded=False)
    if not records:
        return None
    tables = {1.0: paper.CIFAR_FID, 2.0: paper.CIFAR_FID_GUIDED}
    findings = [
        _ordering(records, scale, steps, table, (UNIFORM, MIXED, MASKED))
        for scale, table in tables.items()
        for steps in (32, 128)
    ]
    findings.append(_ordering(records, 1.0, 32, tables[1.0], (MORE, MIXED)))
    return _section("Images: CIFAR-10 as pixels", "pixels", study, records, tables, findings)


def coded_images(study: Study) -> Section | None:
    records = _of(study, coded=True)
    if not records:
        return None
    tables = {1.0: paper.IMAGENET_FID, 2.0: paper.IMAGENET_FID_GUIDED}
    findings = [
        _ordering(records, 1.0, 4, tables[1.0], (MIXED, MASKED)),
        _ordering(records, 1.0, 16, tables[1.0], (MIXED, UNIFORM)),
        _ordering(records, 2.0, 4, tables[2.0], (MIXED, MASKED)),
        _ordering(records, 2.0, 16, tables[2.0], (MASKED, MIXED)),
    ]
    here = (
        f"{records[0].data} here, ImageNet at 256 x 256 in the paper: compare orders, not values."
    )
    return _section("Images: codes of a codec", "codes", study, records, tables, findings, here)


def _section(
    title: str,
    kind: str,
    study: Study,
    records: Sequence[EvalRecord],
    tables: dict[float, PaperTable],
    findings: Sequence[Finding],
    remark: str = "",
) -> Section:
    check_alike(records, _ALIKE, "images")
    parts = [
        f"{_about(study, records, kind)} {alike(records)} {remark}".strip(),
        *painting_took(study, records),
    ]
    for scale, table in tables.items():
        cells = _cells(records, "fid", scale)
        if cells:
            parts += [f"*FID by sampling steps {_SCALES[scale]}, lower is better:*", _table(cells)]
            parts += [_ranks(cells, table)]
        parts.append(of_paper(table))
        parts += missing(table.rows, cells, f"FID {_SCALES[scale]}")
    parts += _folded(records)
    pictures = _pictures(study.pictures, kind)
    return Section(
        title, tuple(table.label for table in tables.values()), parts, findings, pictures=pictures,
        records=records,
        command=f"{train_images_again(records)}\n{paint_again(study.sources(records))}",
    )  # fmt: skip


def _pictures(places: Sequence[str], kind: str) -> dict[str, str]:
    """Those that the study's script painted, the fewest steps first, and what they show."""
    found = [(match, place) for place in places if (match := _PICTURE.search(place))]
    own = [(match, place) for match, place in found if match["kind"] == kind]
    return {
        place: _SHOWS[bool(match["strip"])].format(**match.groupdict())
        for match, place in sorted(
            own, key=lambda one: (int(one[0]["steps"]), bool(one[0]["strip"]))
        )
    }


def _of(study: Study, *, coded: bool) -> list[EvalRecord]:
    """What was measured of models of one kind at their last step, one model of each method."""
    own = [
        r for r in study.painted
        if "process" in r.config and is_coded(r) == coded
    ]  # fmt: skip
    models: dict[str, str] = {}
    for record in own:
        other = models.setdefault(method_of(record), record.model)
        if other != record.model:
            raise UserError(
                f"there are two models of images of {method_of(record)}, {other} and {record.model}; "
                "keep the records of one"
            )
    last = {model: max(r.step for r in own if r.model == model) for model in models.values()}
    return [
        r for m in ordered(models) for r in own if r.model == models[m] and r.step == last[r.model]
    ]


def _cells(records: Sequence[EvalRecord], metric: str, scale: float) -> Grid[int]:
    own = [r for r in records if r.metric == metric and r.guidance == scale]
    return grid(own, lambda r: r.steps or 0)


def _table(cells: Grid[int], *, digits: int | None = None, best: bool = True) -> str:
    steps = sorted({n for row in cells.values() for n in row})
    rows = {name: {str(n): found for n, found in row.items()} for name, row in cells.items()}
    return by_method("here", [str(n) for n in steps], rows, digits=digits, best=best)


def _ordering(
    records: Sequence[EvalRecord],
    scale: float,
    steps: int,
    table: PaperTable,
    order: Sequence[str],
) -> Finding:
    """From best to worst, as the paper has it."""
    cells, theirs = _cells(records, "fid", scale), table.column(steps)
    found = [cells.get(method, {}).get(steps) for method in order]
    tests = [below(order[i], found[i], order[i + 1], found[i + 1]) for i in range(len(order) - 1)]
    what = "codes" if records[0].config["data"]["tokenizer"].startswith("vq:") else "pixels"
    return Finding(
        f"FID of {what}, {steps} steps {_SCALES[scale]}: {' < '.join(order)}",
        " < ".join(f"{theirs[method]:.1f}" for method in order),
        tests,
    )


def _ranks(cells: Grid[int], table: PaperTable) -> str:
    """The order of all methods at each number of steps, here and in the paper."""
    told = []
    for steps in sorted({n for row in cells.values() for n in row}):
        here = {name: row[steps] for name, row in cells.items() if steps in row}
        if sentence := ranked(here, table.column(steps)):
            told.append(f"{steps} steps: {sentence[0].lower()}{sentence[1:]}")
    return " ".join(told)


def _folded(records: Sequence[EvalRecord]) -> list[str]:
    """The other measures, to be clicked on."""
    parts = []
    for metric, name in PAINTED.items():
        for scale, about in _SCALES.items():
            if metric != "fid" and (cells := _cells(records, metric, scale)):
                body = _table(cells, digits=4 if metric == "kid" else 3, best=False)
                parts.append(fold(f"{name} {about}", body.replace(" ± ?", "")))  # shares have none
    return parts


def _about(study: Study, records: Sequence[EvalRecord], kind: str) -> str:
    """What the figures are of, and what the yardstick says of real images."""
    one = records[0]
    trained = sorted({r.step for r in records})
    steps = " or ".join(f"{step:,}" for step in trained)
    first = "first " if "reference_limit" in one.details else ""
    text = (
        f"{one.n:,} images each against the {first}{one.details.get('reference_n', 0):,.0f} of {one.data}, "
        f"after {steps} training steps. Errors (±) are over the images drawn, not over training runs."
    )
    real = [
        r for r in study.painted
        if r.metric == "real_fid" and r.data_sha256 == one.data_sha256
        and (kind == "codes" or " through " not in r.model)
    ]  # fmt: skip
    told = [
        f"{r.model}: FID {estimate(r).shown(3)}" + (f" ({r.n:,} of them)" if r.n != one.n else "")
        for r in sorted(real, key=lambda r: r.model)
    ]
    if told:
        text += f" Real images under the same network: {'; '.join(told)}."
    if not any(r.metric == "inception_score" for r in records):
        text += (
            " There is no Inception Score, which the paper has too: these weights have no classes."
        )
    return text
