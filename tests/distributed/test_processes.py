"""Two processes against one, over gloo on the CPU: the same losses, the same weights, whoever goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xdlm.config import (
    DataConfig,
    LossConfig,
    OptimConfig,
    ProcessConfig,
    RunConfig,
    TrainConfig,
    dump_config,
)
from xdlm.models import DiTConfig
from xdlm.training.checkpoint import MODEL, RAW, latest_checkpoint, open_checkpoint
from xdlm.training.runlog import read_log

METHODS = {
    "mdlm": ProcessConfig(kind="masked"),
    "gidd": ProcessConfig(kind="gidd"),
    "udlm": ProcessConfig(kind="uniform"),
    "xdlm": ProcessConfig(kind="mixed", k=0.1),
}


def recipe(folder: Path, process: ProcessConfig, name: str, **train: object) -> Path:
    settings: dict[str, object] = {
        "steps": 8, "batch": 8, "micro_batch": 3, "device": "cpu", "log_every": 1, "eval_every": 0,
        "save_every": 4, "seed": 5, "keep": 9, "out": str(folder / name),
    }  # fmt: skip
    config = RunConfig(
        process=process,
        model=DiTConfig(depth=1, width=32, heads=2, cond_width=8, dropout=0.0),
        data=DataConfig(length=32, limit=2),
        loss=LossConfig(kept_rows=0.5),
        optim=OptimConfig(lr=1e-3, warmup=3),
        train=TrainConfig(**{**settings, **train}),  # type: ignore[arg-type]
    )
    file = folder / f"{name}.yaml"
    file.write_text(dump_config(config))
    return file


def start(file: Path, processes: int, *flags: str, restarts: int = 0) -> subprocess.Popen[str]:
    own = ["-m", "xdlm.cli.main", "train", str(file), *flags]
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
                   f"--max-restarts={restarts}"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*launch, *own], env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0, said[-3000:]


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_log(run / "log.jsonl")]


def assert_same_run(one: Path, other: Path) -> None:
    for ours, theirs in zip(losses(other), losses(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    a, b = (open_checkpoint(latest_checkpoint(run)) for run in (one, other))
    assert a.step == b.step
    for file in (MODEL, RAW):
        ours, theirs = b.tensors(file), a.tensors(file)
        for name in (
            theirs
        ):  # Adam divides by the gradient's size, so that rounding shows in single weights
            assert (ours[name] - theirs[name]).norm() <= 1e-4 * theirs[name].norm() + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one_does(tmp_path: Path, method: str) -> None:
    for processes in (1, 2):
        finish(start(recipe(tmp_path, METHODS[method], f"by-{processes}"), processes))
    assert_same_run(tmp_path / "by-1", tmp_path / "by-2")


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on(tmp_path: Path, before: int, after: int) -> None:
    process = METHODS["xdlm"]
    finish(start(recipe(tmp_path, process, "straight", log_every=3), 1))
    finish(start(recipe(tmp_path, process, "changed", steps=5, log_every=3), before))
    finish(start(recipe(tmp_path, process, "changed", log_every=3), after, "--resume"))
    straight, changed = (losses(tmp_path / run) for run in ("straight", "changed"))
    assert [line[0] for line in changed] == [3, 5, 6, 8]  # the last step of a run is logged too
    for line in (changed[0], changed[3]):
        assert line == pytest.approx(next(s for s in straight if s[0] == line[0]), rel=1e-5)


@pytest.mark.slow
def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    """kill -9 of one of two: both start again and go on from the last checkpoint by themselves."""
    process = METHODS["xdlm"]
    finish(start(recipe(tmp_path, process, "straight", steps=40, save_every=5), 1))
    run = tmp_path / "killed"
    launcher = start(recipe(tmp_path, process, "killed", steps=40, save_every=5), 2, restarts=2)
    deadline = time.monotonic() + 120
    while latest_checkpoint(run) is None:
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    workers = subprocess.run(
        ["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(workers) == 2
    os.kill(int(workers[1]), signal.SIGKILL)
    finish(launcher)
    assert_same_run(tmp_path / "straight", run)


def test_a_batch_that_cannot_be_shared(tmp_path: Path) -> None:
    process = start(recipe(tmp_path, METHODS["mdlm"], "odd", batch=7), 2)
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0
    assert said.count("xdlm: train.batch 7 cannot be shared by 2 processes evenly") == 1
    assert not (tmp_path / "odd").exists()
