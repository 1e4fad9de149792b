"""`xdlm export`: a trained model's weights alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from xdlm.api import Model, load
from xdlm.cli.options import parse
from xdlm.cli.progress import console, waiting
from xdlm.errors import UserError
from xdlm.files import check_free
from xdlm.hub import check_push, push_folder
from xdlm.images import ImageModel, load_image_model
from xdlm.models import LladaConfig
from xdlm.training.trained import find_model

_DESCRIPTION = """Write a folder with a model's weights, configuration and tokenizer, without the
optimiser's state. FORMAT says for whom:

  xdlm   what `xdlm sample --model` and `xdlm.load` read
  llada  a LLaDA under its published names: config.json, safetensors, tokenizer.json, a model card
  hub    that for any model: what `from_pretrained` of transformers reads, with `import xdlm.auto` for LLaDA
         and backbones of our own. The noise stands in config.json, and `--model` reads the folder too
  peft   the adapters (lora) of a run alone, for peft to put beside the weights that they were trained with

Models of images are written for xdlm alone, and those of codes without their codec. A folder that is called
as a run's checkpoints are, RUN/step-00010000, is found as one of them. In formats other than peft adapters
are merged into the weights. --push puts the folder on the hub, with the token in HF_TOKEN or of `hf auth
login`.

examples:
  xdlm export --model runs/mine --out my-model --dtype bfloat16
  xdlm export --model runs/cifar10-mdlm --out elsewhere/cifar10-mdlm/step-00010000 --dtype bfloat16
  xdlm export --model runs/cpt-xdlm --format llada --dtype bfloat16 --out LLaDA-8B-XDLM
  xdlm export --model runs/mine --format hub --out my-model --push me/my-model --private
  xdlm export --model runs/llada-lora-xdlm --format peft --out adapters
"""


@dataclass(frozen=True)
class Options:
    model: str
    """A run or checkpoint folder."""
    out: str
    """Folder to write."""
    format: Literal["xdlm", "llada", "hub", "peft"] = "xdlm"
    """For whom it is written."""
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Precision of the weights on disk. int8, for --format xdlm, halves bfloat16: a byte for each weight of
    a matrix, a number for each row."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights (ema), or the last ones of training (raw)."""
    push: str | None = None
    """Put the folder into this model repository of the hub too (owner/name), made if it is not there."""
    private: bool = False
    """push: make a repository that others cannot see."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm export", description=_DESCRIPTION)
    check_free(Path(options.out))
    if options.dtype == "int8" and options.format != "xdlm":
        raise UserError(
            "--dtype int8 is a format of xdlm's own; for others use float32 or bfloat16"
        )
    if options.push is not None:
        check_push(options.push)
    elif options.private:
        raise UserError("--private has no meaning without --push; remove it")
    with waiting(f"reading {options.model}"):
        model = _load(options)
    with waiting(f"writing {options.out}"):
        _writer(model, options)(options.out, dtype=getattr(torch, options.dtype))
    size = sum(f.stat().st_size for f in Path(options.out).iterdir())
    console().print(
        f"{options.out}: {model.weights} weights of step {model.step}, {size / 1e6:.1f} MB",
    )
    if options.push is not None:
        url = push_folder(Path(options.out), options.push, private=options.private)
        console().print(f"pushed to {url}")


def _load(options: Options) -> Model | ImageModel:
    images = find_model(options.model).config.data.is_images
    if images and options.format != "xdlm":
        raise UserError(
            f"{options.model} makes images, which others cannot read: leave --format out"
        )
    reader = load_image_model if images else load
    return reader(options.model, device="cpu", weights=options.weights)


def _writer(model: Model | ImageModel, options: Options) -> Callable[..., None]:
    if isinstance(model, ImageModel) or options.format == "xdlm":
        return model.save
    if options.format == "llada" and model.config.model.kind != LladaConfig.kind:
        raise UserError(f"{options.model} is not a LLaDA model: write it with --format hub or xdlm")
    return model.publish_adapters if options.format == "peft" else model.publish
