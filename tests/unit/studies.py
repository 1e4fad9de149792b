"""A study of invented results, whose figures follow the paper's, and its page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache

from results import record

from xdlm.config import RunConfig, from_tree
from xdlm.data import ZERO_SHOT
from xdlm.evaluation.perplexity import mean_perplexity
from xdlm.evaluation.records import EvalRecord
from xdlm.report.study import compose, paper
from xdlm.report.study.collection import Study, collect, with_again
from xdlm.report.study.verdict import Outcome

VALIDATION = "prepared/enwiki2014-validation"
JUDGES = ("judge", "SmolLM2-135M-Instruct-Q8_0.gguf")
STEPS = (8, 32, 128, 1024)
#: Kind and ratio of each method; invented figures follow the paper's.
NOISE = {
    "MDLM": ("masked", None), "GIDD": ("gidd", None), "UDLM": ("uniform", None),
    **{f"XDLM k={k:g}": ("mixed", k) for k in (0.001, 0.1, 0.5, 0.9)},
}  # fmt: skip
#: Where each of the paper's methods lies in a run of this library.
RUNS = {name: f"runs/repro/{name.lower().replace(' k=', '-k')}" for name in NOISE}


def config(method: str, **train: object) -> dict:
    whole = own_config(method)
    return {**whole, "train": {**whole["train"], **train}}


@cache
def own_config(method: str) -> dict:
    kind, k = NOISE[method]
    tree = {
        "process": {"kind": kind} | ({} if k is None else {"k": k}), "model": "tiny",
        "data": {"length": 256, "val": VALIDATION}, "train": {"out": RUNS[method], "batch": 256},
    }  # fmt: skip
    return asdict(from_tree(RunConfig, tree, "a test"))


def of(
    method: str, metric: str, value: float | None, step: int = 2000, **more: object
) -> EvalRecord:
    about = {"model": RUNS[method], "config": config(method), "length": 256, **more}
    return record(metric=metric, value=value, step=step, **about)


def ppl(
    method: str, value: float, data: str = VALIDATION, step: int = 2000, **more: object
) -> EvalRecord:
    about = {"data": data, "data_sha256": data, "draws": 4, "n": 512, "details": {"seconds": 1.5}}
    return of(method, "ppl", value, step, **{**about, **more})


def gen(
    method: str, value: float, steps: int, step: int = 2000, **more: object
) -> list[EvalRecord]:
    about = {
        "steps": steps,
        "sampler": "thinned",
        "temperature": 1.0,
        "top_p": 1.0,
        "n": 64,
        **more,
    }
    judged = [
        of(method, "gen_ppl", value * scale, step,
           **{"stderr": 0.02 * value, "judge": judge, "judge_sha256": judge, **about})
        for judge, scale in zip(JUDGES, (1.0, 1.3), strict=True)
    ]  # fmt: skip
    return [*judged, of(method, "entropy", 5.0, step, **{"stderr": 0.01, **about})]


def changes(method: str, steps: int = 32) -> EvalRecord:
    mixed = method.startswith("XDLM")
    details = {f"unmask/{i:04d}": 8.0 for i in range(steps + 1) if method != "UDLM"}
    if method != "MDLM":
        details |= {f"refine/{i:04d}": 2.0 for i in range(steps + 1)}
    if mixed:
        details |= {f"remask/{i:04d}": 3.0 * (1 - i / steps) for i in range(steps)}
    about = {"steps": steps, "sampler": "thinned", "temperature": 1.0, "top_p": 1.0, "n": 64}
    total = sum(v for k, v in details.items() if k.startswith("refine"))
    return of(method, "transitions", total, details=details, **about)


def real() -> Iterator[EvalRecord]:
    about = {"data": VALIDATION, "data_sha256": VALIDATION, "n": 64}
    for judge in JUDGES:
        yield of("MDLM", "real_ppl", 27.0, judge=judge, judge_sha256=judge, **about)
    yield of("MDLM", "real_entropy", 5.1, **about)


def adapted() -> Iterator[EvalRecord]:
    levels = {"MDLM": 650.0, "XDLM k=0.1": 400.0}
    for method, level in levels.items():
        start = {
            "model": f"runs/repro/adapt-{method[0].lower()}dlm",
            "config": config(method, start=RUNS["MDLM"]),
        }
        yield from gen(method, level, 8, step=300, **start)
        yield of(method, "train_seconds", 12.0, 300, **start)
    yield from gen("MDLM", 720.0, 8, sampler="thinned as mixed, k = 0.1")


def whole() -> list[EvalRecord]:
    found = [*real(), *adapted()]
    for method in NOISE:
        level = paper.VALIDATION.column("PPL")[method]
        for step, share in ((500, 2.0), (1000, 1.4), (2000, 1.0)):
            lag = 1 + 0.2 * (share - 1) * (method != "MDLM")
            found.append(ppl(method, level * share * lag, step=step))
            sets = [
                ppl(method, paper.ZERO_SHOT.column(s)[method] * share * lag, s, step)
                for s in ZERO_SHOT
            ]
            found += [*sets, mean_perplexity(sets)]
            for steps in STEPS if step == 2000 else (128,):
                found += gen(
                    method, paper.OWT_QUALITY.column(steps)[method] * share * lag, steps, step
                )
        details = {"tokens": 2000 * 256 * 256, "parameters": 33e6}
        found += [
            changes(method),
            changes(method, 8),
            of(method, "train_seconds", 180.0, details=details),
        ]
    return found


def repeated(method: str, share: float = 1.0, quality: float = 1.0) -> list[EvalRecord]:
    """The method trained again: perplexities of text times a share, those of more texts times another; its
    own judge was trained again too and finds all texts half as likely."""
    about = {
        "config": config(method, seed=1),
        "model": f"runs/repro/seed-1/{RUNS[method].split('/')[-1]}",
    }
    read = [ppl(method, paper.VALIDATION.column("PPL")[method] * share, **about)]
    sets = [ppl(method, paper.ZERO_SHOT.column(s)[method] * share, s, **about) for s in ZERO_SHOT]
    found = [*read, *sets, mean_perplexity(sets)]
    for steps in (8, 256, 1024):
        for one in gen(method, paper.OWT_QUALITY.column(steps)[method] * quality, steps, **about):
            value = 2 * (one.value or 0) if one.judge == "judge" else one.value
            digest = "again" if one.judge == "judge" else one.judge_sha256
            found.append(
                replace(
                    one,
                    value=value,
                    stderr=(one.stderr or 0) / 4,
                    judge_sha256=digest,
                    n=1024,
                    seed=1,
                )
            )
    return [*found, of(method, "train_seconds", 190.0, **about)]


def trained_twice(share: float = 1.0, quality: float = 1.0) -> Study:
    again = [r for method in ("MDLM", "XDLM k=0.1") for r in repeated(method, share, quality)]
    return with_again(collect(whole()), collect(again))


def page_of(records: list[EvalRecord]) -> str:
    """The page alone: figures take seconds."""
    return page_of_study(collect(records))


def page_of_study(study: Study) -> str:
    return compose(study, "results/repro", "RESULTS.md")[0]


def verdicts(page: str) -> dict[str, str]:
    """Finding -> verdict, of the table on top."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[0]: row[-1].strip("*") for row in rows if row[-1].strip("*") in set(Outcome)}
