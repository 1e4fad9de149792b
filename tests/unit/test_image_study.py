"""The script of the CIFAR-10 study at a tiny size, split between two machines: trained and measured on one,
measured further on the other from what the first exported, as one study."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from threading import Lock

import pytest
from test_image_scores import Toy
from test_images import as_grids

from xdlm.cli.main import main
from xdlm.cli.measures import image as command
from xdlm.evaluation.records import read_records
from xdlm.report.study import read_study

pytest.importorskip("PIL.Image")
#: A word of a command that is to fail.
FAILS = "no-such-word"
SCRIPT = Path(__file__).parents[2] / "recipes" / "cifar10" / "run.py"
TINY = [
    "--lanes", "2", "--n", "4", "--guidance", "1", "2", "--code-guidance", "1", "2", "--batch", "4",
    "--precision", "bfloat16",
]  # fmt: skip
TRAINED = [
    "--minutes", "5", "--train-steps", "2", "--code-train-steps", "2", "--codec-steps", "2",
    "--pixels", "model.channels=4", "train.batch=2", "train.micro_batch=2", "train.eval_every=0",
    "--codes", "model.depth=1", "model.width=24", "model.heads=2", "train.batch=2",
    "train.micro_batch=2", "train.eval_every=0", "--codec", "shape.channels=4", "batch=2",
]  # fmt: skip


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What commands were run, here and not in processes of their own, on six images."""
    as_grids(tmp_path)
    (tmp_path / "cifar10_test.webp").write_bytes((tmp_path / "cifar10_train_1.webp").read_bytes())
    monkeypatch.setenv("XDLM_DATA", str(tmp_path))
    network, commands = Toy(), []
    one_at_a_time = Lock()  # reading a command line is not for two threads
    network.classes = None
    monkeypatch.setattr(command, "load_inception", lambda weights, device: network)

    def xdlm(log: Path, *words: str) -> None:
        commands.append(words)
        if FAILS in words:
            raise SystemExit(f"{log.stem} failed")
        with one_at_a_time:
            main(list(words))

    monkeypatch.setattr("xdlm.cli.lanes.xdlm", xdlm)
    return commands


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["run.py", *TINY, *words])
    runpy.run_path(str(SCRIPT))["main"]()


def test_a_study_on_two_machines(tmp_path: Path, monkeypatch, said) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    runs = ["--runs", "pixels-mdlm", "codes-udlm"]
    run(one, monkeypatch, *TRAINED, *runs, "--steps", "2", "--code-steps", "2", "--export", "kept")
    kept = sorted(f.relative_to(one).as_posix() for f in (one / "kept").glob("*/step-*"))
    assert kept == ["kept/codes-udlm/step-00000002", "kept/pixels-mdlm/step-00000002"]
    assert (one / "kept/codec/codec.json").is_file()
    results = one / "runs/cifar10/results"
    assert {f.name for f in results.glob("*.png")} == {
        f"{kind}-2-steps-guidance-2{what}.png"
        for kind in ("pixels", "codes")
        for what in ("", "-strip")
    }
    assert (results / "curves" / "pixels-mdlm.csv").is_file() and (
        results / "seconds.csv"
    ).is_file()

    shutil.copytree(one / "kept", other / "runs/cifar10")
    shutil.copytree(results, other / "runs/cifar10/results")
    del said[:]
    steps = ["--steps", "2", "3", "--code-steps", "2"]
    run(other, monkeypatch, "--minutes", "0", *runs, *steps, "--no-pictures")
    # The yardstick, the codec, and the models.
    assert [words[:2] for words in said] == [("eval", "image")] * 4
    records = read_records(other / "runs/cifar10/results/pixels-mdlm.jsonl")
    painted = [r for r in records if r.metric == "fid"]
    assert [(r.steps, r.guidance) for r in painted] == [(2, 1.0), (2, 2.0), (3, 1.0), (3, 2.0)]
    assert {(r.model, r.step, r.dtype) for r in records} == {
        ("runs/cifar10/pixels-mdlm", 2, "bfloat16")
    }
    # Four metrics each: the model at four settings, that of codes at two, real images and a codec's.
    assert len(read_study(other / "runs/cifar10/results").painted) == 16 + 8 + 8


def test_what_fails_does_not_keep_the_others(tmp_path: Path, monkeypatch, said) -> None:
    """The real images cannot be measured, nor can one of two models be trained."""
    words = ["--runs", "pixels-mdlm", "pixels-udlm", "--guidance", "1", "--steps", "2"]
    monkeypatch.setitem(globals(), "FAILS", "--images")
    with pytest.raises(SystemExit, match=r"real.measure failed"):
        run(tmp_path / "one", monkeypatch, *TRAINED, *words)
    results = tmp_path / "one/runs/cifar10/results"
    assert {f.stem for f in results.glob("*.jsonl")} == {"pixels-mdlm", "pixels-udlm"}
    assert {f.name for f in results.glob("*.png")} == {
        "pixels-2-steps-guidance-1.png", "pixels-2-steps-guidance-1-strip.png",
    }  # fmt: skip
    assert [command[0] for command in said].count("paint") == 1

    monkeypatch.setitem(globals(), "FAILS", str(SCRIPT.parent / "pixels/mdlm.yaml"))
    with pytest.raises(SystemExit, match=r"pixels-mdlm failed"):
        run(tmp_path / "other", monkeypatch, *TRAINED, *words)
    results = tmp_path / "other/runs/cifar10/results"
    assert {f.stem for f in results.glob("*.jsonl")} == {"pixels-udlm", "real"}
    assert (results / "pixels-2-steps-guidance-1.png").is_file()


def test_a_run_that_was_cut_is_measured_only_when_asked(
    tmp_path: Path, monkeypatch, said, capsys
) -> None:
    """And goes on before."""
    words = ["--runs", "pixels-mdlm", "--guidance", "1", "--steps", "2", "--no-pictures"]
    run(tmp_path / "one", monkeypatch, *TRAINED, *words)
    monkeypatch.setattr("xdlm.cli.lanes.LaneStudy.steps_left", lambda self, run: 3)
    del said[:]
    cut = ["--minutes", "1e-9", *words, "--out", "cut"]
    run(tmp_path / "one", monkeypatch, *cut)
    assert "pixels-mdlm: 3 steps left, not measured" in capsys.readouterr().out
    assert not (tmp_path / "one/cut/pixels-mdlm.jsonl").exists()
    run(tmp_path / "one", monkeypatch, "--minutes", "0", *cut[2:])
    assert (tmp_path / "one/cut/pixels-mdlm.jsonl").is_file()
