"""A trained model, read back from where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from xdlm.bundled import NAMES, bundled_folder
from xdlm.errors import UserError, did_you_mean
from xdlm.models import Denoiser, build_denoiser
from xdlm.noise import NoiseProcess
from xdlm.tokens import TextTokenizer
from xdlm.training.checkpoint import MODEL, RAW, Checkpoint, latest_checkpoint, open_checkpoint


class Trained(NamedTuple):
    """What a checkpoint is made of, ready to predict; `weights` says which ones these are. Without a
    process the denoiser is causal."""

    denoiser: Denoiser
    process: NoiseProcess | None
    tokenizer: TextTokenizer
    weights: str


def read_trained(checkpoint: Checkpoint, *, weights: str = "ema") -> Trained:
    """On the CPU. The averaged weights, or else those that training left."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer()
    vocab = config.process.vocab(tokenizer.size)
    process = config.process.build(vocab)
    denoiser = build_denoiser(config.model, vocab.size, causal=process is None)
    file = MODEL if weights == checkpoint.weights or weights == "ema" else RAW
    checkpoint.read_into(file, dict(denoiser.named_parameters()))
    denoiser.eval().requires_grad_(False)
    return Trained(denoiser, process, tokenizer, checkpoint.weights if file == MODEL else "raw")


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
