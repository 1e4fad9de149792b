"""What every result says about where it comes from."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from xdlm import __version__
from xdlm.evaluation.subject import Loaded
from xdlm.training.device import describe


def provenance(model: Loaded) -> dict[str, Any]:
    """Versions, hardware, precision and the model's own configuration."""
    weight = next(model.denoiser.parameters())
    return {
        "xdlm": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "device": describe(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "weights": model.weights,
        "step": model.step,
        "config": dataclasses.asdict(model.config),
        "tokenizer_sha256": model.tokenizer.digest,
    }


def commit() -> str:
    """The commit that the library runs from, with `-dirty` behind it where files have changed since: of
    its checkout, or what XDLM_COMMIT says where a copy has no history, as in a container."""
    return os.environ.get("XDLM_COMMIT") or commit_of(Path(__file__)) or "unknown"


@cache  # what runs is what was there when it was first asked for
def commit_of(file: Path) -> str | None:
    """Of the repository that a file belongs to; None if it belongs to none. A file that merely lies in a
    repository's folder, as in an environment of somebody's project, is not of that repository."""
    if _git(file, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file, "describe", "--always", "--dirty", "--exclude=*")


def _git(file: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=file.parent
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
