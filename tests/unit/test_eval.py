"""What `xdlm eval` reads unless told otherwise, which weights and settings it uses, what it refuses, and
that Python can do the same without it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import complaint
from test_dynamics import Quick

from xdlm import load
from xdlm.cli.main import main
from xdlm.config import RunConfig
from xdlm.data import load_rows
from xdlm.evaluation.generation import quality
from xdlm.evaluation.judges import Score
from xdlm.evaluation.records import read_records
from xdlm.models import DiTConfig, build_denoiser
from xdlm.sampling import Change
from xdlm.training.checkpoint import MODEL, RAW, Content, save_checkpoint

SHORT = ["--device", "cpu", "--n", "2", "--steps", "2"]


def save(folder: Path, val: str | None) -> None:
    """A run of one checkpoint of a tiny model, whose averaged and raw weights are unlike."""
    pocket = load("pocket", device="cpu")
    data = dataclasses.replace(pocket.config.data, length=32, val=val)
    config = RunConfig(
        process=pocket.config.process, data=data,
        model=DiTConfig(depth=1, width=32, heads=2, cond_width=8),
    )  # fmt: skip
    tensors = {}
    for seed, name in enumerate((MODEL, RAW)):
        torch.manual_seed(seed)
        denoiser = build_denoiser(config.model, pocket.process.vocab.size)
        tensors[name] = {k: 0.2 * torch.randn_like(p) for k, p in denoiser.named_parameters()}
    content = Content(config, pocket.tokenizer.files(), 3, tensors)
    save_checkpoint(folder / "step-00000003", content)


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "own.txt"
    file.write_text("It was a dark and stormy night. " * 60)
    return str(file)


@pytest.fixture
def run(tmp_path: Path, text: str) -> str:
    save(tmp_path / "run", text)
    return str(tmp_path / "run")


@pytest.fixture
def quick(monkeypatch) -> None:
    for module in ("gen", "dynamics"):
        monkeypatch.setattr(f"xdlm.cli.measures.{module}.open_judge", lambda *_: Quick())


@pytest.mark.usefixtures("quick")
def test_a_model_is_measured_on_its_own_validation_text(
    run: str, text: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "r.jsonl")
    main(["eval", "ppl", "--model", run, "--device", "cpu", "--records", file])
    main(["eval", "gen", "--model", run, *SHORT, "--records", file])
    main(["eval", "dynamics", run, *SHORT, "--draws", "1", "--seed", "1", "--records", file])
    found = [r for r in read_records(Path(file)) if r.metric in ("ppl", "real_ppl")]
    assert [(r.metric, r.data) for r in found] == [
        ("ppl", text), ("real_ppl", text), ("ppl", text), ("real_ppl", text),
    ]  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_a_model_without_validation_is_measured_on_the_embedded_corpus(tmp_path: Path) -> None:
    save(tmp_path / "run", None)
    file = tmp_path / "r.jsonl"
    run = str(tmp_path / "run")
    main(["eval", "ppl", "--model", run, "--max-rows", "2", "--records", str(file)])
    main(["eval", "gen", "--model", run, *SHORT, "--records", str(file)])
    assert {r.data for r in read_records(file)} == {"corpus:heldout", None}


@pytest.mark.usefixtures("quick")
def test_validation_text_that_is_gone_or_differs_is_said(
    run: str, text: str, tmp_path: Path, capsys
) -> None:
    Path(text).rename(tmp_path / "moved.txt")
    for arguments in (["ppl", "--model", run], ["gen", "--model", run], ["dynamics", run]):
        line = complaint(capsys, "eval", *arguments, "--records", str(tmp_path / "r.jsonl"))
        assert "no such file" in line and "--data names another" in line
    save(tmp_path / "other", "corpus:heldout")
    line = complaint(capsys, "eval", "dynamics", run, str(tmp_path / "other"))
    assert f"validated on {text} and" in line and "on corpus:heldout" in line
    assert "at least one text" in complaint(capsys, "eval", "ppl", "--model", run, "--data")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("length", [16, 64])
def test_real_text_is_as_long_as_generated_text(
    run: str, text: str, tmp_path: Path, length: int
) -> None:
    """Shorter and longer than in training, by both commands the same rows."""
    file = tmp_path / "r.jsonl"
    main(["eval", "gen", "--model", run, *SHORT, "--length", str(length), "--records", str(file)])
    main(["eval", "dynamics", run, *SHORT, "--length", str(length), "--records", str(file)])
    found = read_records(file)
    assert {r.length for r in found} == {length}
    rows = load_rows(text, load(run, device="cpu").tokenizer, length)
    real = [r for r in found if r.metric.startswith("real_")]
    assert {r.data_sha256 for r in real} == {rows.digest}
    entropy = next(r.value for r in real if r.metric == "real_entropy")
    model = load(run, device="cpu")
    texts = list(rows.take([0, len(rows) - 1]))
    expected = quality([model.tokenizer.decode(ids) for ids in texts], texts, Quick())
    assert entropy == pytest.approx(expected.entropy.value)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("weights", ["ema", "raw"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"top_p": 0.1},
        {"impl": "gumbel"},
        {"impl": "starved"},
    ],
)
def test_texts_are_those_of_the_weights_and_settings(
    run: str, tmp_path: Path, weights: str, settings: dict[str, Any]
) -> None:
    file, samples = tmp_path / "r.jsonl", tmp_path / "texts"
    given = [word for k, v in settings.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    given += [*SHORT, "--weights", weights, "--records", str(file)]
    main(["eval", "gen", "--model", run, *given, "--samples", str(samples)])
    model = load(run, device="cpu", weights=weights)
    expected = model.sample(2, steps=2, seed=0, **settings)
    lines = (samples / "steps-00002.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == expected.text
    records = read_records(file)
    file.unlink()
    main(["eval", "dynamics", run, *given])
    records += read_records(file)
    tokens = [np.asarray(row) for row in expected.tokens]
    judged = [r for r in records if r.metric == "gen_ppl"]
    value = quality(expected.text, tokens, Quick()).perplexity.value
    assert [r.value for r in judged] == pytest.approx([value] * 2)
    assert {r.sampler for r in judged} == {settings.get("impl", "thinned")}
    for name, default in (("temperature", 1.0), ("top_p", 1.0)):
        assert {getattr(r, name) for r in judged} == {settings.get(name, default)}
    assert {r.weights for r in records} == {weights}


def test_the_weights_and_settings_tell_texts_apart(run: str) -> None:
    """What the test above compares differs in every case."""
    texts = [
        "".join(load(run, device="cpu", weights=weights).sample(2, steps=2, **settings).text)
        for weights in ("ema", "raw")
        for settings in ({}, {"temperature": 0.0}, {"temperature": 0.3}, {"top_p": 0.1})
    ]
    assert len(set(texts)) >= 6 and len(set(texts[::4])) == 2


#: Settings that cannot be, and what is said of them.
IMPOSSIBLE = {
    ("--length", "0"): "--length must lie in 1..",
    ("--length", "-4"): "--length must lie in 1..",
    ("--seed", "-1"): "--seed must lie in 0..2^63-1",
    ("--seed", str(2**63)): "--seed must lie in 0..2^63-1",
    ("--top-p", "0"): "top_p must lie in (0, 1]",
    ("--temperature", "-1"): "temperature must be 0 or lie in",
    ("--temperature", "nan"): "temperature must be 0 or lie in",
    ("--n", "0"): "--n must lie in 1..",
    ("--steps", "2", "4", "8", "--n", "2", "4"): "one for each of the 3 of --steps",
    ("--steps", "4", "0"): "at least 1 step",
    ("--draws", "0"): "at least 1",
    ("--max-rows", "0"): "--max-rows must be at least 1",
}
_READING, _WRITING = ("--draws", "--max-rows"), ("--top-p", "--temperature", "--n", "--steps")
REFUSED = {
    "ppl": [words for words in IMPOSSIBLE if words[0] not in _WRITING],
    "gen": [words for words in IMPOSSIBLE if words[0] not in _READING],
    "dynamics": list(IMPOSSIBLE),
}


@pytest.mark.parametrize(
    ("measure", "words"), [(name, words) for name, many in REFUSED.items() for words in many]
)
def test_what_cannot_be_is_said_before_anything_is_written(
    run: str, tmp_path: Path, capsys, measure: str, words: tuple[str, ...]
) -> None:
    which = [run] if measure == "dynamics" else ["--model", run]
    before = sorted(tmp_path.iterdir())
    line = complaint(
        capsys, "eval", measure, *which, *words, "--records", str(tmp_path / "new" / "r.jsonl")
    )
    assert IMPOSSIBLE[words] in line
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("quick")
def test_folders_are_made_when_there_is_something_to_write(
    run: str, tmp_path: Path, capsys
) -> None:
    before = sorted(tmp_path.iterdir())
    files = ["--samples", str(tmp_path / "new1" / "a"), "--records", str(tmp_path / "new2/r.jsonl")]
    assert "no model 'nope'" in complaint(capsys, "eval", "gen", "--model", "nope", *files)
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "file").touch()
    blocked = str(tmp_path / "file" / "deep" / "r.jsonl")
    assert "cannot write" in complaint(capsys, "eval", "ppl", "--records", blocked)
    main(["eval", "gen", "--model", run, *SHORT, *files])
    assert (tmp_path / "new1" / "a" / "steps-00002.jsonl").is_file()
    assert read_records(tmp_path / "new2" / "r.jsonl")


def test_a_figure_without_an_error_says_why(run: str, capsys) -> None:
    one = ["eval", "ppl", "--model", run, "--max-rows", "1"]
    main([*one, "--draws", "1"])
    shown = capsys.readouterr().out
    assert "no error from one row and one draw" in shown and "nan" not in shown and "±" not in shown
    main([*one, "--draws", "2"])
    shown = capsys.readouterr().out
    assert "no error" not in shown and "±" in shown


SCRIPT = """
import sys
from pathlib import Path
from xdlm import load
from xdlm.data import load_rows
from xdlm.evaluation import (
    append_records, measure_perplexity, measure_writing, plan_perplexity, plan_writing,
)
from xdlm.evaluation.judges import Score

class Flat:
    name, sha256 = "flat", "0"
    def score(self, text):
        return Score(2.0 * len(text), len(text))

run, text, out = sys.argv[1:]
model = load(run, device="cpu")
rows = load_rows(text, model.tokenizer, model.length)
plan = plan_perplexity(model, run, text, rows, draws=2)
append_records(Path(out), [measure_perplexity(model, plan, rows)])
plan = plan_writing(model, run, Flat(), n=2, steps=2)
texts, records = measure_writing(model, plan, Flat())
append_records(Path(out), records)
print([name for name in sys.modules if name.startswith(("xdlm.cli", "rich", "tyro"))])
"""


def test_python_makes_the_same_records_without_the_command_line(
    run: str, text: str, tmp_path: Path, monkeypatch
) -> None:
    own, commands = tmp_path / "own.jsonl", tmp_path / "commands.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, run, text, str(own)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    judge = SimpleNamespace(name="flat", sha256="0", score=lambda t: Score(2.0 * len(t), len(t)))
    monkeypatch.setattr("xdlm.cli.measures.gen.open_judge", lambda *_: judge)
    main(
        [
            "eval",
            "ppl",
            "--model",
            run,
            "--device",
            "cpu",
            "--draws",
            "2",
            "--records",
            str(commands),
        ]
    )
    main(["eval", "gen", "--model", run, *SHORT, "--records", str(commands)])
    from_commands = [r for r in read_records(commands) if not r.metric.startswith("real_")]
    assert read_records(own) == from_commands and len(from_commands) == 6


def test_transitions_are_counted(tmp_path: Path) -> None:
    """Every mask that is filled and every token that is masked again adds up to the text's length."""
    file = tmp_path / "r.jsonl"
    main([
        "eval", "gen", "--steps", "3", "--n", "3", "--length", "16", "--device", "cpu", "--k", "0.5",
        "--transitions", "--judge", "pocket-judge", "--records", str(file),
    ])  # fmt: skip
    (found,) = (r for r in read_records(file) if r.metric == "transitions")
    path = load("pocket", device="cpu").mixed(0.5).sample(3, steps=3, length=16).trajectory
    for kind, counts in path.counts().items():
        for step, count in enumerate(counts):
            assert found.details[f"{kind.name.lower()}/{step:04d}"] == pytest.approx(count / 3)
    assert found.value == pytest.approx(sum(path.counts()[Change.REFINE]) / 3)
    assert found.judge is None and found.sampler == "thinned as mixed, k = 0.5"
    totals = {kind: sum(counts) for kind, counts in path.counts().items()}
    masks_at_first = int((path.frames[0] == path.special_ids[0]).sum())
    assert totals[Change.UNMASK] - totals[Change.REMASK] == masks_at_first
