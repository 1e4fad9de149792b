"""`xdlm export`: a trained model's weights alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from xdlm.api import load
from xdlm.cli.options import parse
from xdlm.cli.progress import console

_DESCRIPTION = """Write a folder with a model's weights, configuration and tokenizer, without the
optimiser's state. The result is what `xdlm sample --model` and `xdlm.load` read.

examples:
  xdlm export --model runs/mine --out my-model --dtype bfloat16
"""


@dataclass(frozen=True)
class Options:
    model: str
    """A run or checkpoint folder."""
    out: str
    """Folder to write."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights on disk."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights, or those that training left."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm export", description=_DESCRIPTION)
    model = load(options.model, device="cpu", weights=options.weights)
    model.save(options.out, dtype=getattr(torch, options.dtype))
    size = sum(f.stat().st_size for f in Path(options.out).iterdir())
    console().print(
        f"{options.out}: {model.weights} weights of step {model.step}, {size / 1e6:.1f} MB",
        markup=False,
    )
