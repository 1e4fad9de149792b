"""Curves in TensorBoard and Weights & Biases, when asked for, beside the log that is always written."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from xdlm.config import RunConfig, TrainConfig
from xdlm.errors import UserError
from xdlm.files import explained, write_atomic

#: Folder of TensorBoard's files, and the file that keeps the name of a run in Weights & Biases.
TENSORBOARD, WANDB_ID = "tensorboard", "wandb-id.txt"


class Curves(Protocol):
    """Something that draws values over steps."""

    def add(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_curves(config: TrainConfig) -> None:
    """Fail before anything is read, not after it, if something that is asked for cannot be had."""
    if config.tensorboard:
        _summary_writer()
    if config.wandb is not None:
        _wandb()


def open_curves(config: RunConfig, folder: Path, *, start: int) -> list[Curves]:
    """All that is asked for; what an earlier process drew beyond step `start` is dropped."""
    curves: list[Curves] = []
    if config.train.tensorboard:
        curves.append(TensorBoardCurves(folder / TENSORBOARD, start=start))
    if config.train.wandb is not None:
        curves.append(WandbCurves(config, folder, start=start))
    return curves


class TensorBoardCurves:
    """Files that `tensorboard --logdir` reads."""

    def __init__(self, folder: Path, *, start: int) -> None:
        self._folder = folder
        with explained(folder):
            self._writer = _summary_writer()(str(folder), purge_step=start + 1)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        with explained(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()  # so that a checkpoint is never ahead of its curve

    def close(self) -> None:
        self._writer.close()


class WandbCurves:
    """A run in Weights & Biases. Resumed, it is the same run, which takes each step once; so what was
    drawn before a kill and is computed again stays as it is, and it was the same."""

    def __init__(self, config: RunConfig, folder: Path, *, start: int) -> None:
        wandb, file = _wandb(), folder / WANDB_ID
        if start == 0 or not file.is_file():
            write_atomic(file, secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=config.train.wandb, dir=str(folder), config=dataclasses.asdict(config),
                id=file.read_text(encoding="utf-8").strip(), resume="allow",
            )  # fmt: skip
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"Weights & Biases does not start: {reason}; WANDB_MODE=offline needs no network"
            ) from error

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            "train.tensorboard needs the package tensorboard; install xdlm[log]"
        ) from error
    return SummaryWriter


def _wandb() -> Any:
    """The package, ready to use. A run must not stop at a question: whoever is not logged in is told."""
    try:
        import wandb
    except ImportError as error:
        raise UserError("train.wandb needs the package wandb; install xdlm[wandb]") from error
    offline = wandb.setup().settings.mode in ("offline", "dryrun", "disabled")
    if not offline and not wandb.login(prompt=False, verify=False):
        raise UserError(
            "not logged in to Weights & Biases; run `wandb login`, or set WANDB_MODE=offline"
        )
    return wandb
