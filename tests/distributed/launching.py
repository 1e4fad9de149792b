"""Runs of several processes over gloo: how they are set up, started and ended, and their results."""

from __future__ import annotations

import os
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
    latest_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from xdlm.training.resuming import find_resume
from xdlm.training.runlog import read_log
from xdlm.training.trained import find_model

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
