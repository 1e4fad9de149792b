"""The page about a study: the same bytes from the same records, and what it says is missing or refuses."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from studies import RUNS, VALIDATION, config, gen, page_of, ppl, verdicts, whole
from test_cli import complaint

from xdlm import UserError
from xdlm.cli.main import main
from xdlm.evaluation.records import EvalRecord, append_records
from xdlm.report.study import read_study, write_study
from xdlm.report.study.beside import add_seconds, write_curve
from xdlm.report.study.collection import collect, once
from xdlm.report.study.commands import measure_again, read_again, train_again, write_again

REPOSITORY = Path(__file__).parents[2]


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


def test_the_same_records_give_the_same_bytes(study) -> None:
    page, figures = study(whole())
    assert study(whole(), "two") == (page, figures)
    assert set(figures) == {
        "generation.png", "crossover.png", "trade-off.png", "dynamics.png", "transitions.png",
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
    assert "| 180 | 70 |" in page and "and commands 77 s (1.3 min) of measuring" in page
    assert "(results/figures/losses.png)" in page and (folder / "figures/losses.png").is_file()
    assert (folder / "figures/adaptation.png").is_file()
    assert "<summary>Texts of 8 steps</summary>" in page
    assert "````text\nWritten ```by``` adapt-xdlm\n````" in page
    for damaged in ("step,nats\n1,x\n", "step\n1\n", ""):
        (folder / "curves" / "mdlm.csv").write_text(damaged)
        with pytest.raises(UserError, match=r"mdlm\.csv is no curve of step,nats"):
            read_study(folder)


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
    assert len(figures) == 5 and "± ?" in page and "| inf" in page
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
    assert "no records; give files" in complaint(capsys, "report", "--out", page)
    with pytest.raises(
        UserError, match="two different results for runs/repro/mdlm at step 2000, ppl"
    ):
        once([ppl("MDLM", 20.0), ppl("MDLM", 21.0)])
    with pytest.raises(UserError, match="two models of MDLM and one seed"):
        collect([ppl("MDLM", 20.0), ppl("MDLM", 21.0, model="other")])
    with pytest.raises(UserError, match="records differ in data_sha256"):
        collect([ppl("MDLM", 20.0), ppl("UDLM", 21.0, step=9, data_sha256="x")])


def test_notes_stand_at_the_end(tmp_path: Path) -> None:
    append_records(tmp_path / "r.jsonl", [ppl("MDLM", 20.0)])
    (tmp_path / "notes.md").write_text("Tried: *more*.\n", encoding="utf-8")
    write_study(tmp_path, tmp_path / "R.md")
    page = (tmp_path / "R.md").read_text(encoding="utf-8")
    assert (
        page.endswith("\n\nTried: *more*.\n") and "\n## Notes\n\n*These are people's words" in page
    )
    assert "written by hand ([./notes.md](./notes.md))" in page and "[Notes](#notes)." in page


def test_differences_of_recipes_are_said() -> None:
    other = config("UDLM", batch=128)
    page = page_of([ppl("MDLM", 20.0), ppl("UDLM", 21.0, config=other)])
    assert "differ in more than the noise: train.batch." in page


def test_commands_are_those_of_the_records() -> None:
    read = [ppl("MDLM", 20.0), ppl("UDLM", 20.0), ppl("MDLM", 20.0, "ptb:test")]
    assert read_again(read) == (
        "xdlm eval dynamics runs/repro/{mdlm,udlm} --data prepared/enwiki2014-validation --max-rows 512 "
        "--draws 4 --seed 0 --steps --every 2000 --records results.jsonl"
    )
    rows = [ppl("MDLM", 20.0, row_nats=[1.0], step=step) for step in (1000, 2000)]
    assert "--draws 4 --row-nats --seed 0 --steps --records" in read_again(rows)
    written = [*gen("MDLM", 9.0, 8), *gen("MDLM", 8.0, 32, n=16)]
    judge = ppl(
        "MDLM", 15.0, model="runs/repro/judge", config={"process": {"kind": "autoregressive"}}
    )
    study = collect([*written, judge])
    assert write_again(study, written) == (
        "xdlm eval dynamics runs/repro/mdlm --steps 8 32 --n 64 16 --judge "
        "models/SmolLM2-135M-Instruct-Q8_0.gguf runs/repro/kept/judge --seed 0 --every 2000 "
        "--records results.jsonl"
    )
    assert train_again(study) == (
        "python recipes/repro/run.py --minutes 60 --judge models/SmolLM2-135M-Instruct-Q8_0.gguf "
        "--precision float32"
    )


@pytest.mark.parametrize("name", ["trigrams of corpus:train", "pocket-judge"])
def test_judges_of_the_package_need_no_folder(name: str) -> None:
    own = [
        replace(r, judge=name) for r in gen("MDLM", 9.0, 8, dtype="bfloat16") if r.judge == "judge"
    ]
    known = "ngram" if name.startswith("trigrams") else name
    assert measure_again(collect(own)).endswith(f"--minutes 0 --judge {known} --precision bfloat16")


def test_commands_of_the_kept_page_are_understood(tmp_path: Path, monkeypatch, capsys) -> None:
    """Those of the script by its own options, those of the library by its command line."""
    page = (REPOSITORY / "RESULTS.md").read_text(encoding="utf-8")
    lines = {
        line for block in re.findall(r"```sh\n(.*?)```", page, re.S) for line in block.splitlines()
    }
    assert len(lines) > 4

    def refuse(*_: object, **__: object) -> None:
        raise UserError("understood")

    monkeypatch.setattr("xdlm.cli.measures.draws.open_law", refuse)  # it would draw for minutes
    monkeypatch.setattr("xdlm.cli.lanes.LaneStudy.__init__", refuse)
    monkeypatch.chdir(tmp_path)
    Path("models/SmolLM2-135M-Instruct").mkdir(parents=True)  # a law that is looked for before
    for line in lines:
        first, *words = line.split()
        if first == "xdlm":
            plain = [
                words[2].replace("{", "").replace("}", "") if w == words[2] else w for w in words
            ]
            missing = {"draws": "understood", "image": words[3]}.get(words[1], "runs/repro/mdlm")
            assert missing in complaint(capsys, *plain)
        else:
            monkeypatch.setattr("sys.argv", words)
            script = runpy.run_path(str(REPOSITORY / words[0]))
            names = inspect.unwrap(script["main"]).__globals__
            monkeypatch.setitem(names, "prepare", lambda: None)
            with pytest.raises(UserError, match="understood"):
                script["main"]()


def pinned(package: str) -> bool:
    """Whether the package that is installed is the one that drew the figures."""
    from importlib.metadata import version

    return f"{package}=={version(package)}" in (REPOSITORY / "constraints.txt").read_text()


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
