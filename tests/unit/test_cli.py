"""The command line: help for everything, and one clear line for bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xdlm.cli.eval import MEASURES
from xdlm.cli.main import VERBS, main
from xdlm.cli.options import one_line
from xdlm.evaluation.records import read_records

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "cpu-tiny.yaml")
#: What would be complained of too, if it were looked at.
UNREAD = ("--data.train", "nowhere", "--data.tokenizer", "nowhere", "--train.out", "here")
NO_SUCH_GPU = "no device 'cuda:256'" if torch.cuda.is_available() else "no CUDA device here"
NO_IMAGES = "no model of images at runs/cpu-pixels; train one first, as with `xdlm train"


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail with code 2 and a single line; gives the line."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    assert stop.value.code == 2, captured
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("xdlm: "), captured.err
    assert captured.out == ""
    return lines[0]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples(verb: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code in (0, None)
    assert f"xdlm {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("measure", MEASURES)
def test_every_measure_has_help_with_examples(measure: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["eval", measure, "--help"])
    assert stop.value.code in (0, None)
    shown = capsys.readouterr().out
    assert "examples:" in shown and f"xdlm eval {measure} " in shown and "--seed" in shown


def test_help_is_found_where_people_look_for_it(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["help", "view"])
    assert stop.value.code in (0, None) and "xdlm view" in capsys.readouterr().out
    main(["help"])
    assert "verbs:" in capsys.readouterr().out
    assert "options come after a verb" in complaint(capsys, "--n", "4", "sample")
    command = [sys.executable, "-m", "xdlm", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout[:5] == "xdlm "


def test_refusals_of_the_system_name_the_file(capsys, monkeypatch) -> None:
    def refuse(arguments: list[str]) -> None:
        raise PermissionError(13, "Permission denied", "there/secret.txt")

    monkeypatch.setattr("xdlm.cli.view.run", refuse)
    assert complaint(capsys, "view") == "xdlm: there/secret.txt: Permission denied"


def test_recipes_that_are_empty_or_nearly_named(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("\n")
    assert "empty.yaml is empty" in complaint(capsys, "train", "empty.yaml")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    meant = "did you mean 'recipes/cpu-tiny.yaml'?"
    assert meant in complaint(capsys, "train", "cpu-tiny")
    assert meant in complaint(capsys, "train", "recipes/cpu_tiny.yaml")


def test_usage_lists_every_verb(capsys) -> None:
    main([])
    usage = capsys.readouterr().out
    assert all(verb in usage for verb in VERBS)
    main(["--version"])
    assert "xdlm 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["smaple"], "did you mean 'sample'"),
        (["sample", "--step", "4"], "did you mean '--steps'"),
        (["sample", "--stp", "3"], "did you mean '--steps'?"),
        (["sample", "--stp=3"], "did you mean '--steps'?"),
        (["sample", "--stp"], "did you mean '--stop'?"),
        (["sample", "--no-stpo"], "did you mean '--no-stop'?"),
        (["sample", "--steps", "many"], "--steps takes a whole number, got 'many'"),
        (["sample", "--temperature", "hot"], "--temperature takes a number, got 'hot'"),
        (["sample", "--weights", "old"], "--weights takes one of 'ema', 'raw', got 'old'"),
        (["sample", "--n"], "--n needs a value"),
        (["import", "somewhere"], ": --from and --out must be given; see --help"),
        (["view"], ": FILE must be given; see --help"),
        (["sample", "--steps", "0"], "at least 1 step"),
        (["sample", "--top-p", "2"], "top_p must lie in"),
        (["sample", "--model", "pockte"], "did you mean 'pocket'"),
        (["sample", "--template", "no hole"], "no hole"),
        (["sample", "--n", "0"], "n must lie in"),
        (["sample", "--n", "-2", "--template", "a <mask:3>"], "n must lie in"),
        (["sample", "--template", "<mask:300000000>"], "a hole must have"),
        (["sample", "--template", "a <mask:-1> b <mask:2>"], "'<mask:-1>' is no hole: write"),
        (["sample", "--length", "100000000"], "length must lie in"),
        (["sample", "--temperature", "nan"], "temperature must be"),
        (["sample", "--temperature", "1e-45"], "temperature must be"),
        (["sample", "--device", "mps"], "unknown device"),
        (["sample", "--impl", "dens"], "did you mean 'dense'"),
        (["sample", "--block-length", "8"], "no meaning for the ancestral sampler"),
        (["sample", "--sampler", "confidence", "--guidance", "2"], "needs a prompt"),
        (["sample", "--template", "a <mask:3>", "--stop"], "--template sets"),
        (["sample", "--blank", "any"], "--blank need a --template"),
        (["sample", "--template", "a <mask:3>", "--blank", "[a-z]"], "--blank takes"),
        (["sample", "--template", "a <mask:3>", "--blank", "choices:extraordinarily"], "it takes"),
        (["sample", "--template", "a <mask:3>", "--forced", "king"], "--forced takes"),
        (
            ["sample", "--sampler", "confidence", "--steps", "2", "--block-length", "1"],
            "2 steps cannot fill",
        ),
        (["sample", "--trajectory", "."], "'.' does not end like a trajectory format"),
        (["sample", "--trajectory", "a.htm"], "did you mean '.html'"),
        (["sample", "--trajectory", "here/a.svg"], "here/a.svg: a part of its path is"),
        (["sample", "--json", "."], "it is a folder"),
        (["view", "nowhere.json"], "cannot read nowhere.json"),
        (["view", "here"], "is not JSON"),
        (["view", "here", "--to", "a.png"], "does not end like a trajectory format"),
        (["eval", "ppl", "--batch", "0"], "--draws and --batch must be"),
        (["eval", "ppl", "--max-rows", "-3"], "--max-rows must be at least 1"),
        (["eval", "ppl", "--records", "here"], "here, line 1: not a record"),
        (["eval", "ppl", "--seed", "-1"], "--seed must lie in"),
        (["sample", "--seed", "-1"], "--seed must lie in"),
        (["chat", "--seed", "-1"], "--seed must lie in"),
        (["paint", "--model", "x", "--seed", "-1"], "--seed must lie in"),
        (["paint"], NO_IMAGES),
        (["eval", "image"], NO_IMAGES),
        (["eval"], "which measure"),
        (["eval", "gen", "--steps", "0"], "at least 1"),
        (["eval", "gen", "--judge", "nowhere"], "at nowhere; there are pocket-judge, ngram,"),
        (["eval", "gen", "--judge", "pocket-jugde"], "; did you mean 'pocket-judge'?"),
        (["eval", "gen", "--mauve"], "MAUVE needs a judge with hidden states"),
        (["eval", "dynamic"], "did you mean 'dynamics'"),
        (["eval", "dynamics", "nowhere"], "nowhere holds no checkpoints"),
        (["eval", "ppl", "--data", "ptb:test"], "ptb:test is not there"),
        (["prepare", "--data", "nowhere", "--out", "x"], "no such file or folder"),
        (
            ["prepare", "--data", "corpus:heldout", "--out", "x", "--workers", "0"],
            "at least one worker",
        ),
        (["bench", "--methods", "xdm"], "unknown method 'xdm'"),
        (["bench", "--methods", "trunk", "--tasks", "forward-thinned"], "has no forward-thinned"),
        (["bench", "--preset", "smal"], "did you mean 'small'"),
        (["bench", "--repeats", "0"], "must be at least 1"),
        (["bench", "--loader", RECIPE, "--csv", "x.csv"], "no methods: leave out --csv"),
        (
            ["bench", "--loader", RECIPE, "--in-turn", "--scan", "vocab", "--plot", "x.png"],
            "leave out --plot, --scan, --in-turn",
        ),
        (["bench", "--kept-rows", "0"], "kept_rows must lie in"),
        (["bench", "--scan", "vocabb"], "did you mean 'vocab'"),
        (["demo", "--train-steps", "0"], "must be at least 1"),
        (["train", "--train.steps", "3"], "which recipe"),
        (["train", RECIPE, "--train.seed", "99999999999"], "train.seed must lie in"),
        (["train", RECIPE, "--optim.lr", "nan"], ": optim.lr must be positive and finite, got nan"),
        (["train", RECIPE, "--resume"], "nothing to resume"),
        (["export", "--model", "pocket", "--out", "."], "already exists"),
        (
            ["export", "--model", "pocket", "--out", "x", "--dtype", "int8", "--format", "hub"],
            "int8 is",
        ),
        (["sample", "--length", "3", "--prompt", "far too long a beginning"], "leaves no room"),
        (["eval", "pp"], "did you mean 'ppl'"),
        (["eval", "ppl", "--data", "corpus:test"], "no corpus"),
        (["eval", "ppl", "--draws", "0"], "--draws and --batch must be"),
        (["train"], "which recipe"),
        (["train", "nowhere.yaml"], "no such recipe"),
        (["train", RECIPE, "--optim.lrr", "1"], "did you mean '--optim.lr'"),
        (["train", RECIPE, "--process.k", "1.5"], "k must lie in"),
        (["train", RECIPE, "--data.train", "nowhere"], "no such file"),
        (["train", RECIPE, "--data.tokenizer", "nowhere"], "no tokenizer at"),
        (["train", RECIPE, "--train.out", "here"], "cannot write here: a part of its path is"),
        (["train", RECIPE, *UNREAD, "--train.device", "tpu"], "unknown device 'tpu'; use auto"),
        (["train", RECIPE, *UNREAD, "--train.device", "cuda:007"], "unknown device 'cuda:007'"),
        (["train", RECIPE, *UNREAD, "--train.device", "cuda:256"], NO_SUCH_GPU),
        (["codec", "--out", "x", "--data", "nowhere", "--device", "tpu"], "unknown device"),
        (["train", "here"], "here: expected a mapping, got 'a text'"),
        (["train", "."], "cannot read .: Is a directory"),
        (["tokenizer", "--out", "/proc/nothing"], "cannot write"),
        (["tokenizer", "--out", "here"], "a part of its path is a file, not a folder"),
        (["tokenizer", "--out", "x", "--vocab-size", "10"], "vocab_size must exceed"),
        (["tokenizer", "--out", "x", "--vocab-size", "9" * 24], "at most 10,000,000"),
        (["export", "--model", "nowhere", "--out", "x"], "no model 'nowhere'"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, arguments, says) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDLM_DATA", raising=False)
    (tmp_path / "here").write_text("a text\n")
    assert says in complaint(capsys, *arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["here"], "nothing half-written"


def test_a_tokenizer_is_not_replaced(capsys, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("mine")
    asked = ["tokenizer", "--out", str(tmp_path), "--data", "nowhere"]  # no text is looked at
    assert f"{file} already exists" in complaint(capsys, *asked)
    assert file.read_text() == "mine"


def test_boxed_complaints_are_unpacked() -> None:
    """As tyro draws them on a screen that knows boxes; the other tests' does not."""
    missing = """╭─ Required options ─────────────╮
│ Missing from xdlm codec:       │
│     --data STR                 │
│         Images. (required)     │
│     --out STR                  │
│         Folder. (required)     │
│ ────────────────────────────── │
│ For full helptext, run:        │
│     xdlm codec --help          │
╰────────────────────────────────╯
"""
    assert one_line(missing) == "--data and --out must be given; see --help"
    unknown = """╭─ Unrecognized options ─────────╮
│ Unrecognized options: --stpes  │
│ ────────────────────────────── │
│ Perhaps you meant:             │
│     --steps INT                │
╰────────────────────────────────╯
"""
    assert one_line(unknown) == "Unrecognized options: --stpes; did you mean '--steps'?"


def test_bad_recipe_and_bad_text(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("optim: {warmupp: 3}")
    line = complaint(capsys, "train", "recipe.yaml")
    assert "recipe.yaml" in line and "did you mean 'warmup'" in line
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "short.txt").write_text("Short.")
    for name, says in (
        ("empty", "holds no text"),
        ("latin", "not UTF-8"),
        ("short", "fewer than one row"),
    ):
        arguments = ["train", RECIPE, "--data.train", f"{name}.txt"]
        assert says in complaint(capsys, *arguments)
    assert "holds no text" in complaint(capsys, "eval", "ppl", "--data", "empty.txt")
    assert not (tmp_path / "runs").exists()


def test_sample_writes_what_it_shows(capsys, tmp_path: Path) -> None:
    files = [tmp_path / "t.html", tmp_path / "t.json"]
    main(["sample", "--steps", "4", "--length", "12", "--seed", "3", "--n", "2", "--show",
          "--trajectory", str(files[0]), "--json", str(files[1])])  # fmt: skip
    shown = capsys.readouterr().out
    record = json.loads(files[1].read_text())
    assert len(record["text"]) == 2
    assert all(text.strip() in shown for text in record["text"])
    assert "<html" in files[0].read_text()


def test_sample_by_confidence(capsys, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    main(["sample", "--prompt", "It was", "--sampler", "confidence", "--new-tokens", "16", "--k", "0.5",
          "--steps", "8", "--block-length", "4", "--guidance", "1.5", "--stop", "--show",
          "--json", str(file)])  # fmt: skip
    out, err = capsys.readouterr()
    record = json.loads(file.read_text())
    assert record["text"][0].startswith("It was") and record["text"][0] in out
    assert (record["sampler"], record["k"]) == ("confidence", 0.5)
    assert (record["block_length"], record["guidance"], record["nfe"]) == (4, 1.5, 16)
    assert f"{sum(record['stopped'])} of 1 ended" in " ".join(err.split())


def test_sample_under_rules(capsys) -> None:
    main([
        "sample", "--template", "The <mask:3> said <mask:2>.", "--steps", "4", "--forced", "5=id:7",
        "--blank", "choices:old king|young queen", "any", "--banned", " the", "id:0",
    ])  # fmt: skip
    assert re.match(r"The ?(old king|young queen) said", capsys.readouterr().out)


def test_sample_fills_a_template(capsys) -> None:
    main(["sample", "--template", "The <mask:5> was here.", "--steps", "4"])
    text = capsys.readouterr().out
    assert text.startswith("The") and text.strip().endswith(" was here.")


def test_eval_writes_records(capsys, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    (tmp_path / "own.txt").write_text("It was a dark night. " * 40)
    main(["eval", "ppl", "--data", "corpus:heldout", str(tmp_path / "own.txt"), "--max-rows", "2",
          "--draws", "1", "--records", str(file)])  # fmt: skip
    shown = capsys.readouterr().out
    first, second = read_records(file)
    assert first.weights == "ema" and "ema weights" in shown
    assert first.n == second.n == 2 and f"{first.value:.3f}" in shown
    assert first.data == "corpus:heldout" and first.data_sha256 != second.data_sha256


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = command.replace("xdlm ", f"{sys.executable} -m xdlm.cli.main ")
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_a_closed_pipe_is_no_error() -> None:
    done = shell("xdlm sample --steps 2 --n 40 | head -1")
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_a_full_device_is_one_line() -> None:
    done = shell("xdlm sample --steps 2 --length 8 > /dev/full")
    assert done.returncode == 2 and "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_odd_locale_is_no_error() -> None:
    done = shell("xdlm sample --steps 2 --length 8 --show", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


def test_odd_folder_names(tmp_path: Path, capsys) -> None:
    """Brackets are markup to the library that colours the terminal, and a name to everyone else."""
    out = tmp_path / "[/red]x"
    main(["train", "--train.steps", "1", "--data.limit", "1", "--train.eval-every", "0", RECIPE,
          "--train.out", str(out)])  # fmt: skip
    main(["export", "--model", str(out), "--out", str(tmp_path / "[bold]")])
    assert (tmp_path / "[bold]" / "model.safetensors").is_file()


def test_json_may_go_down_a_pipe() -> None:
    done = shell("xdlm sample --steps 2 --length 8 --json /dev/stdout | cat")
    assert done.returncode == 0, done.stderr
    assert '"nfe"' in done.stdout


@pytest.mark.parametrize("verb", [["sample"], ["train"], ["eval", "ppl"], ["eval", "image"]])
def test_help_fits_the_screen(verb: list[str], capsys, monkeypatch) -> None:
    """Texts are paragraphs, whatever lines they have in the source; examples stay as they are. What may be
    left out is not shown as a value."""
    monkeypatch.setenv("COLUMNS", "90")
    with pytest.raises(SystemExit):
        main([*verb, "--help"])
    lines = capsys.readouterr().out.splitlines()
    boxed = [line.strip("│ ").rstrip() for line in lines if line.startswith("│")]
    assert len(boxed) > 20 and all(len(line) <= 90 for line in lines if line[:2] != "  ")
    text = " ".join(boxed)
    assert "(default: None)" not in text and "{None}|INT" not in text and "{None," not in text
    if verb == ["sample"]:
        assert "the surest masks first and, where the noise has a uniform part," in text
