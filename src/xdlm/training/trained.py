"""A trained model, read back from where it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from xdlm.bundled import NAMES, bundled_folder
from xdlm.config import RunConfig
from xdlm.errors import UserError, did_you_mean
from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.tokens import Tokenizer
from xdlm.training.adapters import frozen_parameters, trained_parameters
from xdlm.training.checkpoint import (
    BASE,
    MODEL,
    RAW,
    Checkpoint,
    latest_checkpoint,
    open_checkpoint,
)
from xdlm.training.device import place
from xdlm.training.drafts import draft
from xdlm.training.fingerprints import fingerprint
from xdlm.training.folders import PublishedOther, Source, is_published, open_published

#: Which weights are read, and what the trunk computes in.
Weights = Literal["ema", "raw"]
Precision = Literal["float32", "bfloat16"]

_CPU = torch.device("cpu")


class Trained(NamedTuple):
    """What a checkpoint is made of, ready to predict; `weights` says which ones these are. Without a
    process the denoiser is causal."""

    denoiser: Denoiser
    process: NoiseProcess | None
    tokenizer: Tokenizer
    weights: str


def read_trained(
    checkpoint: Source,
    *,
    weights: str = "ema",
    device: torch.device = _CPU,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """The averaged weights, or else those that training left. They go to the device one by one, in the
    given precision: a large model is never held twice."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer()
    vocab = config.vocab(tokenizer.size)
    process = config.process.build(vocab)
    blank = draft(config, vocab.size, to_be_read=True)
    denoiser = blank.denoiser.to(dtype)
    place(denoiser, device)
    blank.fill()
    file = MODEL if weights == checkpoint.weights or weights == "ema" else RAW
    if config.lora.rank:
        known = checkpoint.meta.get(BASE) if isinstance(checkpoint, Checkpoint) else None
        read_base(config, frozen_parameters(denoiser), known=known)
    checkpoint.read_into(file, trained_parameters(denoiser))
    denoiser.eval().requires_grad_(False)
    return Trained(denoiser, process, tokenizer, checkpoint.weights if file == MODEL else "raw")


def describe(denoiser: Denoiser, weights: str, step: int) -> str:
    """A model's size and weights, for people."""
    n = sum(p.numel() for p in denoiser.parameters())
    return f"{n / 1e6:.1f} M parameters, {weights} weights of step {step:,}"


def read_start(start: Source, config: RunConfig, targets: Mapping[str, Tensor]) -> None:
    """The weights that a run begins with, averaged ones if there are any."""
    check_start(start, config)
    start.read_into(MODEL, targets, whose="this recipe's model")


def read_base(config: RunConfig, targets: Mapping[str, Tensor], *, known: str | None) -> str:
    """The weights that adapters stand beside, which must be those that they were trained beside. Returns
    their fingerprint; none is `known` where a checkpoint is older than that."""
    base = find_model(config.start() or "")
    found = fingerprint(base.weight_files())
    if known not in (None, found):
        raise UserError(
            f"{base.folder} does not hold the weights that the adapters were trained beside: bring those "
            "back, or train the adapters anew"
        )
    read_start(base, config, targets)
    return found


def check_start(start: Source, config: RunConfig) -> None:
    """That a recipe's model is the one that its first weights are of. Shapes alone do not tell: with
    another number of heads they are the same. Weights that were not trained under noise are what a recipe
    makes of them."""
    theirs, ours = start.config.model, config.model
    if isinstance(start, PublishedOther) and not start.is_denoiser:
        return
    if type(theirs) is not type(ours):  # then their names differ, or they were meant to be moved
        return
    for name in (field.name for field in fields(ours) if field.name not in ours.free):
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            raise UserError(
                f"{start.folder} does not fit this recipe's model: its {name} is {there}, and model.{name} "
                f"is {here}"
            )


def find_model(name: str | Path) -> Source:
    """What `find_checkpoint` finds, or a folder of the kind that hubs hold."""
    folder = bundled(name) or Path(name)
    if is_published(folder) and latest_checkpoint(folder) is None:
        return open_published(folder)
    return find_checkpoint(name)


def find_checkpoint(name: str | Path) -> Checkpoint:
    """A bundled name, a checkpoint folder, or a run folder (its newest checkpoint)."""
    folder = bundled(name) or Path(name)
    if not folder.is_dir():
        raise UserError(f"no model '{name}': not a folder{did_you_mean(str(name), NAMES)}")
    newest = latest_checkpoint(folder)
    return open_checkpoint(newest if newest is not None else folder)


def bundled(name: str | Path) -> Path | None:
    """A plain string may name a bundled model; a `Path`, or a string with a slash, is a folder."""
    return bundled_folder(name) if isinstance(name, str) else None
