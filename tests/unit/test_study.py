"""The page about a study: the same bytes from the same records, and verdicts that numbers alone decide."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
from test_cli import complaint
from test_generation import record

from xdlm import UserError
from xdlm.cli.main import main
from xdlm.config import RunConfig, from_tree
from xdlm.data import ZERO_SHOT
from xdlm.evaluation.perplexity import mean_perplexity
from xdlm.evaluation.records import EvalRecord, append_records
from xdlm.report.study import compose, paper, read_study, write_study
from xdlm.report.study.balance import bowed, distance
from xdlm.report.study.beside import add_seconds, write_curve
from xdlm.report.study.changes import counts_of
from xdlm.report.study.collection import averaged, collect, once
from xdlm.report.study.commands import read_again, write_again
from xdlm.report.study.course import gaps, shrinks
from xdlm.report.study.judges import compare
from xdlm.report.study.page import Section
from xdlm.report.study.verdict import Estimate, Finding, Outcome, agreement, below, positive
from xdlm.report.study.writing import crossing

REPOSITORY = Path(__file__).parents[2]
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


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., tuple[str, dict[str, bytes]]]:
    """Writes a study of some records, and gives the page and its figures."""

    def write(records: list[EvalRecord], name: str = "one") -> tuple[str, dict[str, bytes]]:
        folder = tmp_path / name / "results" / "repro"
        folder.mkdir(parents=True)
        half = len(records) // 2
        append_records(folder / "a.jsonl", records[:half])
        append_records(folder / "b.jsonl", records[half:])
        page = tmp_path / name / "RESULTS.md"
        main(["report", "--results", str(folder), "--out", str(page)])
        drawn = {file.name: file.read_bytes() for file in sorted((folder / "figures").iterdir())}
        return page.read_text(encoding="utf-8"), drawn

    return write


def page_of(records: list[EvalRecord]) -> str:
    """The page alone: figures take seconds."""
    return compose(collect(records), "results/repro", "RESULTS.md")[0]


def verdicts(page: str) -> dict[str, str]:
    """Finding -> verdict, of the table on top."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[0]: row[-1].strip("*") for row in rows if row[-1].strip("*") in set(Outcome)}


def test_the_same_records_give_the_same_bytes(study) -> None:
    page, figures = study(whole())
    assert study(whole(), "two") == (page, figures)
    assert set(figures) == {
        "generation.png", "trade-off.png", "dynamics.png", "transitions.png",
    }  # fmt: skip
    for name, content in figures.items():
        assert len(content) < 100_000, name
        assert f"(results/repro/figures/{name})" in page
        assert b"tEXt" not in content, "no dates, no versions"
    assert not re.search(r"\bnan\b|None|Estimate|/tmp", page)


def test_curves_and_texts_beside_the_records_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    append_records(folder / "a.jsonl", whole())
    log = tmp_path / "log.jsonl"
    log.write_text(
        "".join(f'{{"step": {n}, "loss": 1.0, "elbo": {9 - n / 50}}}\n' for n in range(1, 99))
    )
    runs = {r.model.rpartition("/")[2] for r in whole() if "process" in r.config}
    for run in runs:
        write_curve(log, folder / "curves" / f"{run}.csv")
        texts = folder / "samples" / run / "steps-00008.jsonl"
        texts.parent.mkdir(parents=True)
        texts.write_text(json.dumps({"text": f"Written ```by``` {run}"}) + "\n")
    for command, seconds in (
        ("mdlm", 200),
        ("mdlm.measure", 30),
        ("mdlm.last", 40),
        ("judge.x", 7),
    ):
        add_seconds(folder / "seconds.csv", command, seconds)
    write_study(folder, tmp_path / "RESULTS.md")
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| 180 | 70 |" in page and "and 77 s (1.3 min) of measuring" in page
    assert "(results/figures/losses.png)" in page and (folder / "figures/losses.png").is_file()
    assert (folder / "figures/adaptation.png").is_file()
    assert "<summary>Texts of 8 steps</summary>" in page
    assert "````text\nWritten ```by``` adapt-xdlm\n````" in page
    for damaged in ("step,nats\n1,x\n", "step\n1\n", ""):
        (folder / "curves" / "mdlm.csv").write_text(damaged)
        with pytest.raises(UserError, match=r"mdlm\.csv is no curve of step,nats"):
            read_study(folder)


def test_what_follows_the_paper_holds() -> None:
    page = page_of(whole())
    found = verdicts(page)
    assert len(found) == 13 and set(found.values()) == {"holds"}, found
    assert "| MDLM | 23.32 ± 0.10 | +0.0 % | 23.321 | +0.0 % |" in page
    assert (
        "XDLM k=0.1 and MDLM change places under SmolLM2-135M-Instruct-Q8_0.gguf at 111 steps"
        in page
    )
    assert "under judge at 111 steps; in the paper at 108 steps" in page
    assert "Not measured" not in page.replace("Not measured (sampling steps", "")
    assert "Commands took 1,284 s (21.4 min) of training" in page, "7 x 180 + 2 x 12"
    assert "| adapt-xdlm | XDLM k=0.1 | 8 × 384 | 300 |" in page
    assert "alike but for the noise" in page


def test_what_contradicts_the_paper_does_not_hold() -> None:
    swap = {"MDLM": "UDLM", "UDLM": "MDLM"}
    records = [
        replace(r, model=RUNS[swap[m]], config=config(swap[m]))
        if (m := {v: k for k, v in RUNS.items()}.get(r.model)) in swap and r.metric != "train_seconds"
        else r
        for r in whole()
    ]  # fmt: skip
    found = verdicts(page_of(records))
    for claim in (
        "Validation perplexity",
        "Mean zero-shot",
        "8 sampling steps: XDLM k=0.1 writes better than MDLM",
    ):
        assert next(v for k, v in found.items() if k.startswith(claim)) == "does not hold"


def test_what_noise_hides_is_said_to_be_hidden() -> None:
    noisy = [replace(r, stderr=10 * r.value) if r.value and r.stderr else r for r in whole()]
    found = verdicts(page_of(noisy))
    assert found["Two judges put the methods in the same order"] == "not separated by the noise"
    assert set(found.values()) == {"not separated by the noise"}, found


MISSING = {
    "methods": lambda r: "gidd" not in r.model and "udlm" not in r.model,
    "one judge": lambda r: r.judge != "judge",
    "generated text": lambda r: r.metric in ("ppl", "train_seconds"),
    "likelihood": lambda r: r.metric != "ppl",
    "entropy": lambda r: "entropy" not in r.metric,
    "changes and adaptation": lambda r: r.metric != "transitions" and "adapt" not in r.model,
    "zero-shot": lambda r: r.data in (None, VALIDATION),
    "earlier checkpoints": lambda r: r.step == 2000,
    "the last checkpoint of one method": lambda r: r.step < 2000 or "udlm" not in r.model,
    "device time": lambda r: r.metric != "train_seconds",
    "all but device time": lambda r: r.metric == "train_seconds",
    "all but one record": lambda r: r == ppl("MDLM", 23.321),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_is_said(what: str) -> None:
    page = page_of([r for r in whole() if MISSING[what](r)])
    assert len(verdicts(page)) >= 12
    assert "Not measured" in page or "not measured" in page or what == "entropy"
    said = {
        "methods": "Not measured (methods): GIDD, UDLM.",
        "one judge": "needs texts of the same numbers of steps under two judges",
        "generated text": "Not measured (generated text)",
        "entropy": "Their entropy was not measured",
        "earlier checkpoints": "needs results of two checkpoints",
        "the last checkpoint of one method": "stand under training alone: UDLM (1,000).",
        "device time": "Not measured (device time of training): runs/repro/mdlm, runs/repro/gidd",
    }  # fmt: skip
    assert said.get(what, "not measured") in page


def test_pages_of_few_records_have_their_figures(study) -> None:
    """Infinities, missing errors and missing ends."""
    broken = [
        replace(r, stderr=None) if r.model == RUNS["GIDD"] else r for r in whole()
        if r.model != RUNS["UDLM"] and r.judge != "judge"
    ]  # fmt: skip
    broken = [replace(r, value=None) if r.model == RUNS["XDLM k=0.5"] else r for r in broken]
    page, figures = study(broken)
    assert len(figures) == 4 and "± ?" in page and "| inf" in page
    assert study([ppl("MDLM", 20.0)], "two")[1] == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"judge_sha256": "x"}, "judge_sha256"), ({"n": 9}, "records differ in n"),
        ({"dtype": "bfloat16"}, "dtype"), ({"top_p": 0.9}, "top_p"),
    ],
)  # fmt: skip
def test_what_does_not_compare_is_refused(
    tmp_path: Path, capsys, change: dict, reason: str
) -> None:
    found = whole()
    place = next(
        i for i, r in enumerate(found) if r.metric == "gen_ppl" and r.model == RUNS["UDLM"]
    )
    found[place] = replace(found[place], **change)
    append_records(tmp_path / "r.jsonl", found)
    page = tmp_path / "RESULTS.md"
    assert reason in complaint(capsys, "report", "--results", str(tmp_path), "--out", str(page))
    assert [f.name for f in tmp_path.iterdir()] == ["r.jsonl"], "nothing is written"


def test_other_refusals(tmp_path: Path, capsys) -> None:
    folder, page = str(tmp_path), str(tmp_path / "R.md")
    assert "holds no records" in complaint(capsys, "report", "--results", folder, "--out", page)
    assert "is a folder" in complaint(capsys, "report", "--results", folder, "--out", folder)
    line = complaint(capsys, "report", "--results", folder, "--records", "r", "--out", page)
    assert "leave out --records" in line
    assert "there are no records" in complaint(capsys, "report", "--out", page)
    with pytest.raises(
        UserError, match="two different results for runs/repro/mdlm at step 2000, ppl"
    ):
        once([ppl("MDLM", 20.0), ppl("MDLM", 21.0)])
    with pytest.raises(UserError, match="two models of MDLM and one seed"):
        collect([ppl("MDLM", 20.0), ppl("MDLM", 21.0, model="other")])
    with pytest.raises(UserError, match="records differ in data_sha256"):
        collect([ppl("MDLM", 20.0), ppl("UDLM", 21.0, step=9, data_sha256="x")])


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        ((10, 1), (20, 1), Outcome.HOLDS), ((20, 1), (10, 1), Outcome.FAILS),
        ((10, 1), (12.8, 1), Outcome.NOISE), ((12.8, 1), (10, 1), Outcome.NOISE),
        ((10, 1), (12.9, 1), Outcome.HOLDS), ((10, 0), (10, 0), Outcome.NOISE),
        ((10, 0), (11, 0), Outcome.HOLDS), ((10, math.nan), (99, 1), Outcome.UNKNOWN),
        ((10, 1), (math.inf, math.nan), Outcome.UNKNOWN),
    ],
)  # fmt: skip
def test_verdicts(low: tuple, high: tuple, outcome: Outcome) -> None:
    """Two standard errors of the difference, √2 here, decide."""
    assert below("a", Estimate(*low), "b", Estimate(*high)).outcome == outcome


def test_verdicts_in_words() -> None:
    clear = below("a", Estimate(10, 1), "b", Estimate(20, 1))
    assert clear.words == "a 10.00 ± 1.00 < b 20.00 ± 1.00, 7.1 standard errors"
    assert clear.brief == "10.00 < 20.00 (7.1 se)"
    nothing = below("a", None, "b", Estimate(20, 1))
    assert (nothing.outcome, nothing.words) == (Outcome.UNKNOWN, "a not measured")
    noise = positive(Estimate(1, 1), "so", "so")
    assert Finding("c", "p", [clear, noise]).outcome == Outcome.NOISE
    assert Finding("c", "p", [clear, nothing, noise]).outcome == Outcome.UNKNOWN
    fails = positive(Estimate(-9, 1), "so", "so")
    assert Finding("c", "p", [clear, nothing, fails]).outcome == Outcome.FAILS
    assert Finding("c", "p", []).sentence == "c: **not measured**."
    assert "- c: **holds** (a 10.00" in Section(
        "t", findings=[Finding("c", "p", [clear])]
    ).markdown("f")


def test_seeds_of_evaluation_are_averaged() -> None:
    """Other texts, smaller errors; the same text under other noise keeps its error."""
    texts = [gen("MDLM", value, 8, seed=seed)[0] for seed, value in enumerate((90.0, 110.0))]
    (one,) = averaged([replace(r, stderr=3.0) for r in texts])
    assert one.value == 100 and one.stderr == pytest.approx(3 / math.sqrt(2))
    (read,) = averaged(
        [ppl("MDLM", 20.0, seed=0, stderr=1.0), ppl("MDLM", 22.0, seed=1, stderr=1.0)]
    )
    assert (read.value, read.stderr) == (21, 1)
    assert len(once([*texts, *texts])) == 2


def test_seeds_of_training_stand_beside() -> None:
    other = config("MDLM", seed=1)
    page = page_of([*whole(), ppl("MDLM", 24.0, model="runs/repro/mdlm-s1", config=other)])
    assert "MDLM, seed 1: 24.00 ± 0.10 against 23.32 ± 0.10" in page
    assert "| MDLM | 23.32 ± 0.10 | +0.0 %" in page


def test_an_autoregressive_model_stands_beside_and_takes_no_part() -> None:
    own = {**config("MDLM"), "process": {"kind": "autoregressive"}}
    exact = [ppl("MDLM", 15.0, model="runs/repro/judge", config=own, step=s) for s in (1000, 2000)]
    time = of("MDLM", "train_seconds", 99.0, model="runs/repro/judge", config=own)
    page = page_of([*whole(), *exact, time])
    assert "15.00 ± 0.10 for the autoregressive judge, exact and no bound." in page
    assert "| judge | AR | 8 × 384 | 2,000 |" in page and page.count("15.00 ± 0.10") == 1
    assert verdicts(page) == verdicts(page_of(whole()))


def test_notes_stand_at_the_end(tmp_path: Path) -> None:
    append_records(tmp_path / "r.jsonl", [ppl("MDLM", 20.0)])
    (tmp_path / "notes.md").write_text("Tried: *more*.\n", encoding="utf-8")
    write_study(tmp_path, tmp_path / "R.md")
    assert (
        (tmp_path / "R.md").read_text(encoding="utf-8").endswith("\n## Notes\n\nTried: *more*.\n")
    )


def test_differences_of_recipes_are_said() -> None:
    other = config("UDLM", batch=128)
    page = page_of([ppl("MDLM", 20.0), ppl("UDLM", 21.0, config=other)])
    assert "differ in more than the noise: train.batch." in page


def test_gaps_over_training() -> None:
    cells = {
        "MDLM": {100: Estimate(100, 1), 200: Estimate(50, 0.5), 300: Estimate(40, 0.4)},
        "XDLM k=0.1": {100: Estimate(150, 1.5), 200: Estimate(60, 0.6), 400: Estimate(1, 1)},
    }
    found = gaps(cells)
    assert list(found) == [100, 200]
    assert found[100][:2] == pytest.approx((math.log(1.5), 0.01 * math.sqrt(2)))
    assert shrinks("x", "y", found).outcome == Outcome.HOLDS
    assert (
        shrinks("x", "y", dict(zip((1, 2), reversed(found.values()), strict=True))).outcome
        == Outcome.FAILS
    )
    assert shrinks("x", "y", {100: found[100]}).outcome == Outcome.UNKNOWN


def test_where_lines_cross() -> None:
    """Straight on logarithmic axes: 4 to 1 against 2 to 2 over 8 to 32 steps meet halfway."""
    assert crossing({8: 4.0, 32: 1.0}, {8: 2.0, 32: 2.0}) == pytest.approx([16])
    assert crossing({8: 4.0, 32: 3.0}, {8: 2.0, 32: 2.0}) == []


def test_the_distance_from_the_line() -> None:
    places = {
        "MDLM": (Estimate(50, 0), Estimate(150, 3)), "UDLM": (Estimate(60, 0), Estimate(90, 4)),
        "XDLM k=0.1": (Estimate(55, 1), Estimate(100, 0)),
    }  # fmt: skip
    away = distance(places)
    # Halfway the line is at 120; errors are half of 3 and of 4, and the slope of -6 times 1.
    assert away[:2] == pytest.approx((20, math.hypot(1.5, 2, 6)))
    assert bowed(places).outcome == Outcome.HOLDS
    above = {**places, "XDLM k=0.1": (Estimate(55, 0), Estimate(140, 0))}
    assert bowed(above).outcome == Outcome.FAILS
    outside = {**places, "XDLM k=0.1": (Estimate(70, 0), Estimate(80, 0))}
    assert "not between" in bowed(outside).words
    assert bowed({}).outcome == Outcome.UNKNOWN


def test_judges_that_disagree() -> None:
    def cells(*values: float) -> dict[str, dict[int, Estimate]]:
        return {name: {8: Estimate(v, 1)} for name, v in zip("abc", values, strict=True)}

    (same,) = compare(cells(10, 20, 30), cells(1, 20, 21))
    assert (same.tau, same.pairs, same.sure, same.opposed) == (1, 3, 2, [])
    (other,) = compare(cells(10, 20, 30), cells(30, 20, 10))
    assert other.tau == -1 and len(other.opposed) == 3
    assert agreement([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)


def test_counts_of_changes() -> None:
    counts = counts_of(changes("XDLM k=0.1"))
    assert counts.total("unmask")[:2] == pytest.approx((8 * 33, math.sqrt(8 * 33 / 64)))
    assert counts.per_step["remask"][0] == 3 and counts.per_step["remask"][32] == 0
    assert counts_of(changes("UDLM")).total("unmask")[:2] == (0, 0)
    # 66 refined tokens a text, known to ± 3.0466: three times √(66/64), so all counts scatter like that.
    wide = counts_of(replace(changes("XDLM k=0.1"), stderr=3 * math.sqrt(66 / 64)))
    assert wide.total("unmask").stderr == pytest.approx(3 * math.sqrt(8 * 33 / 64))


def test_commands_are_those_of_the_records() -> None:
    read = [ppl("MDLM", 20.0), ppl("UDLM", 20.0), ppl("MDLM", 20.0, "ptb:test")]
    assert read_again(read) == (
        "xdlm eval dynamics runs/repro/{mdlm,udlm} --data prepared/enwiki2014-validation --max-rows 512 "
        "--draws 4 --seed 0 --steps --records results.jsonl"
    )
    assert write_again(gen("MDLM", 9.0, 8)).splitlines()[1] == (
        "xdlm eval dynamics runs/repro/mdlm --steps 8 --n 64 --judge judge --seed 0 "
        "--records results.jsonl"
    )


def test_figures_of_the_paper() -> None:
    """Read off the paper by eye."""
    assert paper.VALIDATION.column("PPL")["XDLM k=0.001"] == 23.495
    assert paper.ZERO_SHOT.value("XDLM k=0.5", "pubmed:test") == 43.373
    assert paper.ZERO_SHOT.value("UDLM", "zero-shot") == 59.574
    assert paper.OWT_QUALITY.value("UDLM", 1024) == 106.666
    assert paper.OWT_ENTROPY.value("MDLM", 8) == 5.872
    assert paper.LM1B_QUALITY.value("XDLM k=0.1", 4) == 246.134
    assert paper.LM1B_QUALITY.value("XDLM k=0.9", 4) is None
    assert paper.LM1B_ENTROPY.value("UDLM", 128) == 4.336
    assert paper.LM1B_COURSE.value("GIDD", "500,000") == 102.367
    assert paper.ZERO_SHOT_COURSE.value("XDLM k=0.1", "100,000") == 64.847
    assert paper.ADAPTATION.value("continued as XDLM k=0.1", "MBPP") == 15.0
    sets = [c for c in paper.ZERO_SHOT.columns if c != "zero-shot"]
    assert sorted(sets) == sorted(ZERO_SHOT)
    for method in paper.METHODS:
        mean = sum(paper.ZERO_SHOT.value(method, s) or 0 for s in sets) / len(sets)
        assert mean == pytest.approx(paper.ZERO_SHOT.value(method, "zero-shot"), abs=1e-3)


def pinned(package: str) -> bool:
    """Whether the package that is installed is the one that drew the figures."""
    from importlib.metadata import version

    return f"{package}=={version(package)}" in (REPOSITORY / "constraints.txt").read_text()


@pytest.mark.skipif(not (REPOSITORY / "results" / "repro").is_dir(), reason="no results are kept")
def test_the_results_that_are_kept_are_those_of_their_records(tmp_path: Path) -> None:
    kept, folder = REPOSITORY / "results" / "repro", tmp_path / "results" / "repro"
    folder.mkdir(parents=True)
    shutil.copytree(kept, folder, ignore=shutil.ignore_patterns("figures"), dirs_exist_ok=True)
    write_study(folder, tmp_path / "RESULTS.md")
    assert (tmp_path / "RESULTS.md").read_bytes() == (REPOSITORY / "RESULTS.md").read_bytes()
    drawn = {f.name: f.read_bytes() for f in (folder / "figures").iterdir()}
    held = {f.name: f.read_bytes() for f in (kept / "figures").iterdir()}
    assert drawn.keys() == held.keys()
    if not (pinned("matplotlib") and pinned("pillow")):
        pytest.skip("figures were drawn by the matplotlib and pillow of constraints.txt")
    assert drawn == held
