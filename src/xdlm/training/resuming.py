"""Which run goes on, and what of it may change."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from xdlm.config import RunConfig
from xdlm.errors import UserError
from xdlm.training.checkpoint import Checkpoint, latest_checkpoint, open_checkpoint


def find_resume(out: Path, *, resume: bool, again: bool = False) -> Checkpoint | None:
    """The checkpoint to go on from; refuses to start over a run that is already there. One that was
    started `again` by its launcher goes on by itself, if there is anything to go on from."""
    latest = latest_checkpoint(out)
    if latest is None:
        if resume and not again:
            raise UserError(f"nothing to resume: {out} holds no checkpoint")
        return None
    if not resume and not again:
        raise UserError(f"{out} already holds {latest.name}; add --resume or choose another folder")
    return open_checkpoint(latest)


def check_same_run(saved: RunConfig, now: RunConfig) -> None:
    """What decides the course of a run must not change under it; where it ends, what it logs and
    how it is computed may."""
    free = {"out", "steps", "minutes", "micro_batch", "device", "parallel", "activation_checkpointing",
            "compile", "log_every", "eval_every", "eval_rows", "save_every", "keep", "keep_every",
            "tensorboard", "wandb"}  # fmt: skip
    if now.optim.decay:  # the learning rate counts back from the end
        free -= {"steps"}
    before, after = dataclasses.asdict(saved), dataclasses.asdict(now)
    for section, values in before.items():
        for name, value in values.items():
            if (section != "train" or name not in free) and after[section][name] != value:
                raise UserError(
                    f"cannot resume: {section}.{name} was {value} and is now {after[section][name]}"
                )
