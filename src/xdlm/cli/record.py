"""What every result says about where it comes from."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from xdlm import __version__
from xdlm.api import Model
from xdlm.files import write_atomic
from xdlm.training.device import describe


def provenance(model: Model) -> dict[str, Any]:
    """Versions, hardware, precision and the model's own configuration."""
    weight = model.denoiser.head_weight
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
    """The commit that the library runs from: of its checkout, or what XDLM_COMMIT says where a copy has
    no history, as in a container."""
    if given := os.environ.get("XDLM_COMMIT"):
        return given
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
            cwd=Path(__file__).parent,
        )  # fmt: skip
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def write_json(file: Path, record: Mapping[str, Any]) -> None:
    """Strict JSON: a number that is not one becomes null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    write_atomic(file, json.dumps(clean, indent=2, allow_nan=False) + "\n")
