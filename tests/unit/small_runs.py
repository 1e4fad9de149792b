"""Runs that take a second or two."""

from __future__ import annotations

from pathlib import Path

from xdlm.api import load_tokenizer
from xdlm.cli.train import read_rows
from xdlm.config import DataConfig, OptimConfig, ProcessConfig, RunConfig, TrainConfig
from xdlm.models import PRESETS
from xdlm.training.trainer import Trainer


def small_run(out: Path, **train) -> RunConfig:
    settings = {
        "steps": 12, "batch": 6, "micro_batch": 4, "device": "cpu", "log_every": 1,
        "eval_every": 0, "save_every": 4, "seed": 5,
    }  # fmt: skip
    return RunConfig(
        process=ProcessConfig(kind="mixed", k=0.1),
        model=PRESETS["nano"].__class__(
            depth=1, width=32, heads=2, cond_width=8, dropout=0.1
        ),  # dropout on: its randomness must resume too
        data=DataConfig(length=32, limit=2),
        optim=OptimConfig(lr=1e-3, warmup=5),
        train=TrainConfig(out=str(out), **{**settings, **train}),  # type: ignore[arg-type]
    )


def trainer_for(config: RunConfig) -> Trainer:
    tokenizer = load_tokenizer("pocket")
    rows = read_rows(config.data.train, tokenizer, config.data, limit=config.data.limit)
    return Trainer(config, tokenizer, rows)
