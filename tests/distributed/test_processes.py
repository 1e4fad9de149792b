"""Two processes against one, over gloo on the CPU: the same losses, the same weights, whoever goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from xdlm import UserError, load
from xdlm.api import load_tokenizer
from xdlm.cli.train import make_trainer
from xdlm.config import (
    DataConfig,
    LossConfig,
    OptimConfig,
    ProcessConfig,
    RunConfig,
    TrainConfig,
    dump_config,
    load_config,
)
from xdlm.models import DiTConfig
from xdlm.training.checkpoint import (
    MODEL,
    RAW,
    checkpoint_folder,
    latest_checkpoint,
    open_checkpoint,
    run_checkpoints,
)
from xdlm.training.runlog import read_log
from xdlm.training.trainer import find_resume

METHODS = {
    "mdlm": ProcessConfig(kind="masked"),
    "gidd": ProcessConfig(kind="gidd"),
    "udlm": ProcessConfig(kind="uniform"),
    "xdlm": ProcessConfig(kind="mixed", k=0.1),
}

#: Several runs one after another, each going on from what is there: starting processes takes longest.
#: Gradients travel in several parts; how many were on their way before the backward pass was over is
#: written to a file beside the recipe. Blocks hand a weight of theirs on, as they do where kernels run.
TRAIN_ALL = """
import sys
from pathlib import Path
from torch.nn import functional as F
from xdlm.api import load_tokenizer
from xdlm.cli.train import make_trainer
from xdlm.config import load_config
from xdlm.models import dit
from xdlm.training import engine
from xdlm.training.checkpoint import latest_checkpoint, open_checkpoint
from xdlm.training.parallel import join_world

finish, seen = engine.GradientSum.finish, [0, 0]
engine._BUCKET = 3000

def counted(self):
    seen[:] = self._next, len(self._buckets)
    finish(self)

engine.GradientSum.finish = counted

def bias_left_to_the_next(self, h, how):
    inner = F.gelu(self.mlp_in(h), approximate="tanh")
    return F.linear(inner, self.mlp_out.weight), self.mlp_out.bias

dit.Block._mlp = bias_left_to_the_next

with join_world() as world:
    for file in map(Path, sys.argv[1:]):
        config = load_config(file)
        latest = latest_checkpoint(config.train.out)
        trainer = make_trainer(config, load_tokenizer(config.data.tokenizer), world)
        if latest is not None:
            trainer.restore(open_checkpoint(latest))
        assert trainer.run()
        file.with_suffix(".early").write_text(f"{seen[0]} of {seen[1]}")
"""

#: A process that never gets beyond the middle of writing its second checkpoint.
STUCK_WRITER = """
import time
from pathlib import Path
from xdlm.cli.main import main
from xdlm.training import checkpoint, saving

def stuck(scratch, content, described, seal=checkpoint.seal):
    if content.step == 4:
        Path("{note}").write_text(str(scratch))
        time.sleep(600)
    seal(scratch, content, described)

checkpoint.seal = saving.seal = stuck
main()
"""


def recipe(folder: Path, process: ProcessConfig, name: str, **train: object) -> Path:
    settings: dict[str, object] = {
        "steps": 8, "batch": 8, "micro_batch": 3, "device": "cpu", "log_every": 1, "eval_every": 0,
        "save_every": 4, "seed": 5, "keep": 9, "out": str(folder / name),
    }  # fmt: skip
    config = RunConfig(
        process=process,
        model=DiTConfig(depth=2, width=32, heads=2, cond_width=8, dropout=0.0),
        data=DataConfig(length=32, limit=2, val=str(folder / "val.txt")),
        loss=LossConfig(kept_rows=0.5),
        optim=OptimConfig(lr=1e-3, warmup=3),
        train=TrainConfig(**{**settings, **train}),  # type: ignore[arg-type]
    )
    file = folder / f"{name}.yaml"
    file.write_text(dump_config(config))
    return file


def run_here(file: Path, *, resume: bool = False) -> None:
    """One process: this one."""
    config = load_config(file)
    trainer = make_trainer(config, load_tokenizer(config.data.tokenizer))
    if resume:
        trainer.restore(find_resume(Path(config.train.out), resume=True))
    assert trainer.run()


def launch(
    arguments: list[str | Path], *, restarts: int = 0, processes: int = 2
) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
                f"--max-restarts={restarts}"]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *(launcher if processes > 1 else []), *map(str, arguments)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def start(file: Path, *flags: str, restarts: int = 0) -> subprocess.Popen[str]:
    return launch(["-m", "xdlm.cli.main", "train", file, *flags], restarts=restarts)


def train_all(files: list[Path]) -> None:
    """Runs of two processes, one after another."""
    script = files[0].with_name("train_all.py")
    script.write_text(TRAIN_ALL)
    finish(launch([script, *files]))


def finish(process: subprocess.Popen[str]) -> None:
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0, said[-3000:]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def kill_all(process: subprocess.Popen[str]) -> None:
    for pid in (*workers_of(process), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)


def lines(run: Path, *fields: str) -> list[tuple[float, ...]]:
    records = read_log(run / "log.jsonl")
    return [tuple(r[f] for f in ("step", *fields)) for r in records if fields[0] in r]


def losses(run: Path) -> list[tuple[float, ...]]:
    return lines(run, "loss", "grad_norm")


def assert_same_run(one: Path, other: Path) -> None:
    for ours, theirs in zip(losses(other), losses(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for ours, theirs in zip(*(lines(run, "val_nats") for run in (other, one)), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    a, b = (open_checkpoint(latest_checkpoint(run)) for run in (one, other))
    assert a.step == b.step
    for file in (MODEL, RAW):
        ours, theirs = b.tensors(file), a.tensors(file)
        assert ours.keys() == theirs.keys()
        for name in theirs:
            # Adam divides by the gradient's size, so that rounding shows in single weights
            assert (ours[name] - theirs[name]).norm() <= 1e-4 * theirs[name].norm() + 1e-6


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """With all weights on both, gradients on their way before the last are there; and sharded, some with
    blocks that are computed twice. Three micro batches a step on one process, two on each of two."""
    validating = {
        "eval_every": 4,
        "eval_rows": 100,
    }  # batches that two cannot share evenly, and a tail
    (tmp_path / "val.txt").write_text(
        "The cat sat on the mat, and thought of something else. " * 150
    )
    files = []
    for method, process in METHODS.items():
        run_here(recipe(tmp_path, process, f"{method}-one", **validating))
        files.append(recipe(tmp_path, process, f"{method}-ddp", **validating))
        twice = method in ("gidd", "xdlm")
        sharded = {"parallel": "fsdp", "activation_checkpointing": twice, **validating}
        files.append(recipe(tmp_path, process, f"{method}-fsdp", **sharded))
    train_all(files)
    for method in METHODS:
        one, ddp, fsdp = (tmp_path / f"{method}-{how}" for how in ("one", "ddp", "fsdp"))
        assert len(losses(one)) == 8 and len(lines(one, "val_nats")) == 2
        assert_same_run(one, ddp)
        assert_same_run(one, fsdp)
        early, of = map(int, ddp.with_suffix(".early").read_text().split(" of "))
        assert of > 4 and early >= of - 1, "gradients waited for the end of the backward pass"


@pytest.mark.slow
def test_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    """Two and then one, one and then two; what two wrote is a model like any other."""
    process, log = METHODS["xdlm"], {"log_every": 3}
    short = {**log, "steps": 5, "save_every": 1, "keep": 2}
    ways = ("ddp", "fsdp")
    run_here(recipe(tmp_path, process, "straight", **log))
    train_all([recipe(tmp_path, process, f"2-{way}-1", **short, parallel=way) for way in ways])
    for way in ways:
        two_then_one = tmp_path / f"2-{way}-1"
        kept = [folder.name for folder in run_checkpoints(two_then_one)]
        assert kept == ["step-00000004", "step-00000005"]
        assert (latest_checkpoint(two_then_one) / MODEL).is_file() == (way == "ddp")
        assert_damage_is_found(two_then_one / "step-00000004")
        assert_exports(two_then_one, tmp_path / f"exported-{way}")
        run_here(recipe(tmp_path, process, two_then_one.name, **log), resume=True)
        run_here(recipe(tmp_path, process, f"1-{way}-2", **short))
    train_all([recipe(tmp_path, process, f"1-{way}-2", **log, parallel=way) for way in ways])
    straight = {line[0]: line for line in losses(tmp_path / "straight")}
    for name in (f"{change}" for way in ways for change in (f"2-{way}-1", f"1-{way}-2")):
        changed = losses(tmp_path / name)
        assert [line[0] for line in changed] == [3, 5, 6, 8]  # the last of a run is logged too
        for line in (changed[0], changed[3]):
            assert line == pytest.approx(straight[line[0]], rel=1e-5)


def assert_damage_is_found(checkpoint: Path) -> None:
    file = next(checkpoint.rglob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file.name} is damaged"):
        load(checkpoint, device="cpu")


def assert_exports(run: Path, to: Path) -> None:
    loaded = load(run, device="cpu")
    loaded.save(to)
    samples = [m.sample(1, steps=2, length=8).tokens for m in (loaded, load(to, device="cpu"))]
    assert samples[0].tolist() == samples[1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_worker_is_replaced(tmp_path: Path, parallel: str) -> None:
    """kill -9 of one of two: both start again and go on from the last checkpoint by themselves."""
    process, often = METHODS["xdlm"], {"steps": 30, "save_every": 3}
    run_here(recipe(tmp_path, process, "straight", **often))
    run = tmp_path / "killed"
    launcher = start(recipe(tmp_path, process, run.name, **often, parallel=parallel), restarts=2)
    wait_for(lambda: latest_checkpoint(run), launcher)
    workers = workers_of(launcher)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    finish(launcher)
    assert_same_run(tmp_path / "straight", run)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_in_the_middle_of_a_checkpoint(tmp_path: Path, processes: int) -> None:
    """kill -9 of all of a run while a checkpoint is half written, and training has gone on meanwhile."""
    process, often = METHODS["xdlm"], {"save_every": 2, "parallel": "fsdp"}
    run_here(recipe(tmp_path, process, "straight", **often))
    run, note, script = tmp_path / "killed", tmp_path / "note", tmp_path / "script.py"
    script.write_text(STUCK_WRITER.format(note=note))
    file = recipe(tmp_path, process, run.name, **often)
    killed = launch([script, "train", file], processes=processes)
    wait_for(lambda: note.exists() and losses(run)[-1][0] > 4, killed)
    kill_all(killed)
    scratch = Path(note.read_text())
    assert scratch.is_dir() and any(scratch.rglob("*.safetensors"))
    assert run_checkpoints(run) == [checkpoint_folder(run, 2)]
    if processes == 1:
        run_here(file, resume=True)
    else:
        finish(start(file, "--resume"))
    assert not scratch.exists()
    assert_same_run(tmp_path / "straight", run)


def test_a_batch_that_cannot_be_shared(tmp_path: Path) -> None:
    process = start(recipe(tmp_path, METHODS["mdlm"], "odd", batch=7))
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0
    assert said.count("xdlm: train.batch 7 cannot be shared by 2 processes evenly") == 1
    assert not (tmp_path / "odd").exists()
