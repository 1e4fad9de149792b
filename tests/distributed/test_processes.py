"""Two processes against one, over gloo on the CPU: the same losses, the same weights, whoever goes on."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

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
from xdlm.models import DiTConfig, LladaConfig, ModelConfig, build_denoiser
from xdlm.training.checkpoint import (
    MODEL,
    RAW,
    Content,
    checkpoint_folder,
    latest_checkpoint,
    open_checkpoint,
    run_checkpoints,
    save_checkpoint,
)
from xdlm.training.resuming import find_resume
from xdlm.training.runlog import read_log
from xdlm.training.trained import find_model

#: One at a time, on one worker: each of them starts processes enough for two cores.
pytestmark = pytest.mark.xdist_group("processes")
METHODS = {
    "mdlm": ProcessConfig(kind="masked"),
    "gidd": ProcessConfig(kind="gidd"),
    "udlm": ProcessConfig(kind="uniform"),
    "xdlm": ProcessConfig(kind="mixed", k=0.1),
}
NANO = DiTConfig(depth=2, width=32, heads=2, cond_width=8, dropout=0.0)

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
from xdlm.models import layers
from xdlm.training import engine
from xdlm.training.checkpoint import latest_checkpoint, open_checkpoint
from xdlm.training.parallel import join_world
from xdlm.training.trained import find_model

finish, seen = engine.GradientSum.finish, [0, 0]
engine._BUCKET = 3000

def counted(self):
    seen[:] = self._next, len(self._buckets)
    finish(self)

engine.GradientSum.finish = counted

def bias_left_to_the_next(self, h, how):
    inner = F.gelu(self.mlp_in(h), approximate="tanh")
    return F.linear(inner, self.mlp_out.weight), self.mlp_out.bias

layers.Block._mlp = bias_left_to_the_next

with join_world() as world:
    for file in map(Path, sys.argv[1:]):
        config = load_config(file)
        latest = latest_checkpoint(config.train.out)
        trainer = make_trainer(config, load_tokenizer(config.data.tokenizer), world)
        if latest is not None:
            trainer.restore(open_checkpoint(latest))
        elif config.start():
            trainer.start_from(find_model(config.start()))
        assert trainer.run()
        file.with_suffix(".early").write_text(f"{seen[0]} of {seen[1]}")
"""

#: Runs one after another, none of which comes to its end. What each process has to say about it is written
#: beside the recipe.
FAIL_ALL = """
import sys
from pathlib import Path
from xdlm import UserError
from xdlm.api import load_tokenizer
from xdlm.cli.train import make_trainer
from xdlm.config import load_config
from xdlm.training import saving
from xdlm.training.parallel import join_world

def unreadable(folder, files):
    raise OSError(5, "Input/output error")

with join_world() as world:
    for file in map(Path, sys.argv[1:]):
        config = load_config(file)
        if file.stem == "unreadable" and world.rank == 1:
            saving.describe_files = unreadable
        try:
            make_trainer(config, load_tokenizer(config.data.tokenizer), world).run()
        except UserError as error:
            file.with_suffix(f".{world.rank}").write_text(str(error))
"""

#: A process that never gets beyond the middle of writing its second checkpoint: the first time, at least,
#: if it kills itself there.
STUCK_WRITER = """
import os, signal, time
from pathlib import Path
from xdlm.cli.main import main
from xdlm.training import checkpoint, saving

def stuck(scratch, content, described, seal=checkpoint.seal):
    if content.step == 4 and not Path("{note}").exists():
        Path("{note}").write_text(str(scratch))
        if "{way}" == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    seal(scratch, content, described)

checkpoint.seal = saving.seal = stuck
main()
"""


def recipe(
    folder: Path,
    process: ProcessConfig,
    name: str,
    *,
    lr: float = 1e-3,
    model: ModelConfig = NANO,
    **train: object,
) -> Path:
    settings: dict[str, object] = {
        "steps": 8, "batch": 8, "micro_batch": 3, "device": "cpu", "log_every": 1, "eval_every": 0,
        "save_every": 4, "seed": 5, "keep": 9, "out": str(folder / name),
    }  # fmt: skip
    config = RunConfig(
        process=process,
        model=model,
        data=DataConfig(length=32, limit=2, val=str(folder / "val.txt")),
        loss=LossConfig(kept_rows=0.5),
        optim=OptimConfig(lr=lr, warmup=3),
        train=TrainConfig(**{**settings, **train}),  # type: ignore[arg-type]
    )
    file = folder / f"{name}.yaml"
    file.write_text(dump_config(config))
    return file


def adapting(folder: Path) -> dict[str, Any]:
    """Settings of a run as LLaDA's recipes have it, and the weights that it starts with."""
    tokenizer = load_tokenizer("pocket")
    shape = LladaConfig(
        depth=2, width=32, heads=2, mlp_width=48, vocab_size=tokenizer.size + 3,
        mask_id=tokenizer.size + 1,
    )  # fmt: skip
    config = load_config(recipe(folder, METHODS["xdlm"], "start", model=shape))
    torch.manual_seed(0)
    tensors = {MODEL: dict(build_denoiser(shape, shape.vocab_size).named_parameters())}
    save_checkpoint(folder / "start", Content(config, tokenizer.files(), 0, tensors))
    return {"model": shape, "start": str(folder / "start"), "activation_checkpointing": True}


def run_here(file: Path, *, resume: bool = False) -> None:
    """One process: this one."""
    config = load_config(file)
    trainer = make_trainer(config, load_tokenizer(config.data.tokenizer))
    if resume:
        trainer.restore(find_resume(Path(config.train.out), resume=True))
    elif first := config.start():
        trainer.start_from(find_model(first))
    assert trainer.run()


def launch(
    arguments: Sequence[str | Path],
    *,
    restarts: int = 0,
    processes: int = 2,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    meeting = "--standalone" if port is None else f"--master-port={port}"
    launcher = ["-m", "torch.distributed.run", meeting, f"--nproc-per-node={processes}",
                f"--max-restarts={restarts}"]  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *(launcher if processes > 1 else []), *map(str, arguments)],
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )  # fmt: skip


def start(
    file: Path, *flags: str, restarts: int = 0, port: int | None = None
) -> subprocess.Popen[str]:
    return launch(["-m", "xdlm.cli.main", "train", file, *flags], restarts=restarts, port=port)


def script_of(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(text)
    return script


def train_all(files: list[Path]) -> None:
    """Runs of two processes, one after another."""
    finish(launch([script_of(files[0].parent, TRAIN_ALL), *files]))


def finish(process: subprocess.Popen[str]) -> str:
    said = last_words(process)
    assert process.returncode == 0, said[-3000:]
    return said


def last_words(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=120)[1]
    except subprocess.TimeoutExpired:
        kill_all(process)
        raise


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


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
    blocks that are computed twice, of a LLaDA that is trained on too. Three micro batches a step on one
    process, two on each of two."""
    validating = {
        "eval_every": 4,
        "eval_rows": 100,
    }  # batches that two cannot share evenly, and a tail
    (tmp_path / "val.txt").write_text(
        "The cat sat on the mat, and thought of something else. " * 150
    )
    files = []
    # Each process has one of the two micro batches that one alone has: the rest is a sum in float32.
    half = {"precision": "bfloat16", "micro_batch": 4}
    run_here(recipe(tmp_path, METHODS["xdlm"], "half-one", **half))
    for way in ("ddp", "fsdp"):
        files.append(recipe(tmp_path, METHODS["xdlm"], f"half-{way}", **half, parallel=way))
    for method, process in METHODS.items():
        run_here(recipe(tmp_path, process, f"{method}-one", **validating))
        files.append(recipe(tmp_path, process, f"{method}-ddp", **validating))
        twice = method in ("gidd", "xdlm")
        sharded = {"parallel": "fsdp", "activation_checkpointing": twice, **validating}
        files.append(recipe(tmp_path, process, f"{method}-fsdp", **sharded))
    llada = adapting(tmp_path)
    run_here(recipe(tmp_path, METHODS["xdlm"], "llada-one", **llada))
    files.append(recipe(tmp_path, METHODS["xdlm"], "llada-fsdp", **llada, parallel="fsdp"))
    train_all(files)
    assert_same_run(tmp_path / "llada-one", tmp_path / "llada-fsdp")
    assert_same_run(tmp_path / "half-ddp", tmp_path / "half-fsdp")
    for ours, theirs in zip(
        losses(tmp_path / "half-ddp"), losses(tmp_path / "half-one"), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-3)  # in half precision a bias added later shows
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
    """kill -9 of one of two: both start again and go on from the last checkpoint by themselves, with sums
    for the next line of the log that both had begun; the other one has no more than a line to say.

    A run that meets at a given port has no number of its own.
    """
    process, often = METHODS["xdlm"], {"steps": 30, "save_every": 3, "log_every": 7}
    run_here(recipe(tmp_path, process, "straight", **often))
    run = tmp_path / "killed"
    file = recipe(tmp_path, process, run.name, **often, parallel=parallel)
    launcher = start(file, restarts=2, port=free_port() if parallel == "ddp" else None)
    wait_for(lambda: latest_checkpoint(run), launcher)
    workers = workers_of(launcher)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    assert "Traceback" not in finish(launcher)
    assert_same_run(tmp_path / "straight", run)


@pytest.mark.slow
def test_the_first_process_is_replaced_in_the_middle_of_a_checkpoint(tmp_path: Path) -> None:
    process, often = METHODS["xdlm"], {"save_every": 2}
    run_here(recipe(tmp_path, process, "straight", **often))
    script = script_of(tmp_path, STUCK_WRITER.format(note=tmp_path / "note", way="kill"))
    file = recipe(tmp_path, process, "killed", **often, parallel="fsdp")
    finish(launch([script, "train", file], restarts=1))
    assert (tmp_path / "note").exists()
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.slow
def test_a_scheduler_ends_a_run(tmp_path: Path) -> None:
    """SIGTERM for all of them, and for the workers once more by their launcher: they save and stop."""
    run = tmp_path / "ended"
    launcher = start(recipe(tmp_path, METHODS["xdlm"], run.name, steps=10**6, save_every=0))
    wait_for(lambda: (run / "log.jsonl").exists() and losses(run), launcher)
    for pid in (*workers_of(launcher), launcher.pid):
        os.kill(pid, signal.SIGTERM)
    said = last_words(launcher)
    saved = open_checkpoint(latest_checkpoint(run))
    assert f"stopped at step {saved.step}, saved {saved.folder}" in said
    assert losses(run)[-1][0] == saved.step


@pytest.mark.slow
def test_what_ends_one_process_ends_all(tmp_path: Path) -> None:
    """A checkpoint's folder that is in the way, in the middle or at the end; a file that one of them cannot
    read again; a loss that is no number. None waits for the other, and both know why they stop."""
    process, sharded = METHODS["mdlm"], {"parallel": "fsdp"}
    for name, step in (("blocked", 4), ("blocked-last", 8)):
        (checkpoint_folder(tmp_path / name, step) / "of-somebody").mkdir(parents=True)
    files = [
        recipe(tmp_path, process, "blocked", save_every=1, **sharded),
        recipe(tmp_path, process, "blocked-last", save_every=0, **sharded),
        recipe(tmp_path, process, "diverged", lr=1e30, save_every=0),
        recipe(tmp_path, process, "unreadable", **sharded),
    ]
    finish(launch([script_of(tmp_path, FAIL_ALL), *files]))
    # Told by the one that failed, or by the next vote, whichever comes first.
    other = "another process could not write (its part of )?a checkpoint"
    for name, *reasons in (
        ("blocked", "step-00000004 already exists", other),
        ("blocked-last", "step-00000008 already exists", other),
        ("diverged", "the loss is nan", "the loss is nan"),
        ("unreadable", other, "cannot write .*: Input/output error"),
    ):
        for rank, reason in enumerate(reasons):
            assert re.search(reason, (tmp_path / f"{name}.{rank}").read_text())
    assert [folder.name for folder in run_checkpoints(tmp_path / "blocked")][-1] == "step-00000003"
    assert run_checkpoints(tmp_path / "unreadable") == []


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_in_the_middle_of_a_checkpoint(tmp_path: Path, processes: int) -> None:
    """kill -9 of all of a run while a checkpoint is half written, and training has gone on meanwhile."""
    process, often = METHODS["xdlm"], {"save_every": 2, "parallel": "fsdp"}
    run_here(recipe(tmp_path, process, "straight", **often))
    run, note = tmp_path / "killed", tmp_path / "note"
    script = script_of(tmp_path, STUCK_WRITER.format(note=note, way="sleep"))
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
    said = last_words(process)
    assert process.returncode != 0
    assert said.count("xdlm: train.batch 7 cannot be shared by 2 processes evenly") == 1
    assert not (tmp_path / "odd").exists()
