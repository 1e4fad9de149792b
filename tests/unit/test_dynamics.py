"""Checkpoint by checkpoint: what is measured, what is skipped, and that an interruption costs nothing."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
from rich.table import Table
from small_runs import small_run, trainer_for
from test_cli import complaint

from xdlm import load
from xdlm.api import load_tokenizer
from xdlm.cli.main import main
from xdlm.cli.measures.common import show_table
from xdlm.data import ZERO_SHOT, load_rows
from xdlm.evaluation.judges import Score
from xdlm.evaluation.records import EvalRecord, measurement, read_records


class Quick:
    """A judge that costs nothing: words that follow each other in the alphabet are likely."""

    name, sha256 = "quick", "0"

    def score(self, text: str) -> Score:
        words = text.split()
        return Score(sum(1.0 + (a > b) for a, b in pairwise(words)), max(len(words) - 1, 1))


SHORT = ["--max-rows", "3", "--draws", "1", "--n", "2", "--steps", "1", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs of a tiny model, with two and three checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "own.txt").write_text("It was a dark and stormy night. " * 60)
    for name, steps in (("a", 4), ("b", 6)):
        settings = {"save_every": 2, "keep": 1, "keep_every": 2}
        trainer_for(small_run(folder / name, steps=steps, **settings)).run()
    return folder


def measure(runs: Path, file: Path, *more: str) -> list[EvalRecord]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xdlm.cli.measures.dynamics.open_judge", lambda *_: Quick())
        main(["eval", "dynamics", str(runs / "a"), str(runs / "b"), "--records", str(file),
              "--data", str(runs / "own.txt"), *SHORT, *more])  # fmt: skip
    return read_records(file)


@pytest.fixture(scope="module")
def whole(runs: Path) -> bytes:
    """The records of an uninterrupted call."""
    measure(runs, runs / "whole.jsonl")
    return (runs / "whole.jsonl").read_bytes()


def test_every_checkpoint_is_measured(runs: Path, whole: bytes) -> None:
    found = read_records(runs / "whole.jsonl")
    places = [(r.model, r.step) for r in found if r.metric == "ppl"]
    a, b = str(runs / "a"), str(runs / "b")
    assert places == [(a, 2), (a, 4), (b, 2), (b, 4), (b, 6)]
    judged = [(r.model, r.step, r.steps) for r in found if r.metric == "gen_ppl"]
    assert judged == [(*place, steps) for place in places for steps in (1, 2)]
    assert [r.metric for r in found].count("real_ppl") == 1
    costs = [(r.model, r.step, r.details["tokens"]) for r in found if r.metric == "train_seconds"]
    assert costs == [(*place, 6 * 32 * place[1]) for place in places]
    last = load(runs / "b" / "step-00000006", device="cpu")
    rows = load_rows(str(runs / "own.txt"), last.tokenizer, 32)
    expected = last.perplexity_of(rows, draws=1, max_rows=3)
    assert found[-12].metric == "ppl" and found[-12].value == pytest.approx(expected.value)


@pytest.mark.parametrize("lines", [0, 7, 20, 35])
def test_an_interrupted_call_goes_on(runs: Path, whole: bytes, tmp_path: Path, lines: int) -> None:
    """Killed after some lines, in the middle of the next: the records end up the same, in the same
    order but where a kill fell among the results of one set of texts."""
    kept = b"".join(whole.splitlines(keepends=True)[:lines])
    file = tmp_path / "d.jsonl"
    file.write_bytes(kept + whole.splitlines()[lines][:50])
    found = measure(runs, file)
    assert file.read_bytes().startswith(kept)
    assert sorted(file.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert len({measurement(r) for r in found}) == len(found)


def test_nothing_is_measured_twice(
    runs: Path, whole: bytes, tmp_path: Path, monkeypatch, capsys
) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setattr("xdlm.api.Model.perplexity_of", None)
        patch.setattr("xdlm.api.Model.sample", None)
        measure(runs, file)
        assert "0 results measured" in capsys.readouterr().out
        assert file.read_bytes() == whole
    more = measure(runs, file, "--seed", "3", "--every", "4")
    new = more[len(whole.splitlines()) :]
    assert {r.step for r in new} == {4} and {r.seed for r in new} == {3}


@pytest.mark.filterwarnings("error")  # the names are long, and there is room for them
def test_the_report_draws_it(runs: Path, whole: bytes, tmp_path: Path, capsys) -> None:
    main(["report", "--records", str(runs / "whole.jsonl"), "--out", str(tmp_path / "r")])
    assert "Who leads when" in capsys.readouterr().out
    assert {"dynamics.png", "dynamics.svg", "crossovers.csv"} <= {
        file.name for file in (tmp_path / "r").iterdir()
    }


def test_what_cannot_be_measured_is_one_line(runs: Path, tmp_path: Path, capsys) -> None:
    for arguments, says in (
        ([], "which runs?"),
        ([str(tmp_path)], "holds no checkpoints"),
        ([str(runs / "a"), "--every", "5"], "no checkpoint at a multiple of 5"),
        ([str(runs / "a"), "--every", "0"], "--every must be at least 1"),
        ([str(runs / "a"), "--steps", "0"], "at least 1"),
        ([str(runs / "a"), "--records", str(tmp_path)], "it is a folder"),
        ([str(runs / "a"), "--data", "nowhere.txt"], "no such file"),
    ):
        assert says in complaint(capsys, "eval", "dynamics", *arguments)


#: Where the seven sets lie in files of one document each.
SETS = {
    "ptb/ptb.test.txt": "a line of text",
    "wikitext2/wiki.test.raw": "Some text . ",
    "lm1b/news.en.heldout-00000-of-00050": "One sentence .",
    "lambada/lambada_test.jsonl": '{"text": "a passage"}',
    "ag_news/test.csv": '"3","A title","What it says."',
    "pubmed/some.jsonl": '{"abstract": "An abstract."}',
    "arxiv/some.jsonl": '{"text": "Another abstract."}',
}


def test_zero_shot_sets_and_their_mean(runs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDLM_DATA", str(tmp_path))
    for name, line in SETS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((line + "\n") * 30)
    file = tmp_path / "r.jsonl"
    main(["eval", "ppl", "--model", str(runs / "b"), "--zero-shot", "--length", "16", "--draws", "1",
          "--max-rows", "99", "--records", str(file)])  # fmt: skip
    validation, *sets, mean = read_records(file)
    assert validation.data == "corpus:heldout" and validation.n == 99
    assert [r.data for r in sets] == list(ZERO_SHOT) and mean.data == "zero-shot"
    assert {r.details["documents"] for r in sets} == {30}
    assert mean.value == pytest.approx(sum(r.value for r in sets) / 7)
    assert mean.stderr == pytest.approx(sum(r.stderr**2 for r in sets) ** 0.5 / 7)
    assert {r.length for r in (*sets, mean)} == {16} and mean.n == sum(r.n for r in sets)
    shown = capsys.readouterr().out
    assert "rows of 16 tokens, the end token after every document" in shown and "mean of 7" in shown
    measure(runs, tmp_path / "d.jsonl", "--zero-shot", "--length", "16")
    means = [r for r in read_records(tmp_path / "d.jsonl") if r.data == "zero-shot"]
    assert len(means) == 5


#: Documents of each set as it is published, but for the two papers' sets, which are samples; and tokens of
#: GPT-2, with one at the end of each document.
PUBLISHED = {
    "ptb:test": (3761, 91135), "wikitext2:test": (2891, 273329), "lm1b:test": (6075, 176267),
    "lambada:test": (5153, 428743), "ag_news:test": (7600, 400108), "pubmed:test": (1000, 348047),
    "arxiv:test": (2000, 546694),
}  # fmt: skip


@pytest.mark.skipif("XDLM_DATA" not in os.environ, reason="XDLM_DATA unset: the sets are not here")
@pytest.mark.parametrize("name", ZERO_SHOT)
def test_zero_shot_sets_are_whole(name: str) -> None:
    """All documents are there, and in the papers' rows of 1,024 tokens of GPT-2 all of their tokens."""
    has_gpt2 = (Path(os.environ["XDLM_DATA"]) / "gpt2" / "tokenizer.json").is_file()
    rows = load_rows(name, load_tokenizer("gpt2" if has_gpt2 else "pocket"), 1024)
    documents, tokens = PUBLISHED[name]
    assert rows.n_documents == documents and len(rows) >= 50
    if has_gpt2:
        assert rows.n_tokens == tokens


def test_a_table_too_wide_to_read_is_turned(capsys) -> None:
    """A line of many results becomes a column; one that fits, or has as many lines, stays as it is."""
    wide = Table("run", "step", *(f"judge, {n} steps" for n in range(30)))
    wide.add_row("runs/mdlm", "5,000", *(f"{n}.25 ± 0.50" for n in range(30)))
    show_table(wide, "many results")
    shown = capsys.readouterr().out
    assert "…" not in shown and len(shown.splitlines()) > 32
    assert re.search(r"judge, 29 steps\s+│ 29\.25 ± 0\.50", shown)
    narrow = Table("run", "step", "judge")
    narrow.add_row("runs/mdlm", "5,000", "7.25")
    show_table(narrow, "few")
    assert re.search(r"runs/mdlm │ 5,000 │ 7\.25", capsys.readouterr().out)


def test_texts_may_have_a_seed_of_their_own(runs: Path, whole: bytes, tmp_path: Path) -> None:
    """They are those of that seed, whatever comes with them; what is read stays as it is."""
    alone = ["--text-seed", "3", "--batch-tokens", "32"]
    other = measure(runs, tmp_path / "other.jsonl", *alone)
    seeded = measure(runs, tmp_path / "seeded.jsonl", "--seed", "3")
    read = [r for r in other if r.metric == "ppl"]
    assert read == [r for r in read_records(runs / "whole.jsonl") if r.metric == "ppl"]
    own, expected = ([r for r in rs if r.metric == "entropy"] for rs in (other, seeded))
    assert [(r.seed, r.value) for r in own] == [(3, pytest.approx(r.value)) for r in expected]
    before = [r.value for r in read_records(runs / "whole.jsonl") if r.metric == "entropy"]
    assert before != [r.value for r in own]


def test_batches_that_cannot_be_are_refused(runs: Path, capsys) -> None:
    run = str(runs / "a")
    assert "--batch-tokens" in complaint(capsys, "eval", "dynamics", run, "--batch-tokens", "0")
    assert "seed" in complaint(capsys, "eval", "dynamics", run, "--text-seed", "-1")
