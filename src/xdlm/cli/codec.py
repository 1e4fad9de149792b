"""`xdlm codec`: make a codec from images."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from xdlm.cli.options import parse
from xdlm.cli.progress import console, progress
from xdlm.data import load_images
from xdlm.errors import UserError
from xdlm.files import check_writable
from xdlm.tokens import Pixels
from xdlm.tokens.vq import VqConfig
from xdlm.training.codec import CodecStep, save_codec, train_codec
from xdlm.training.device import pick_device

_DESCRIPTION = """Train a VQ codec on images: it turns an image into a few codes, and codes into an image.

examples:
  xdlm codec --data cifar10:train --out codecs/cifar10
  xdlm codec --data cifar10:train --out codecs/small --shape.channels 16 --shape.codes 256 --steps 500
  xdlm codec --data photographs/ --side 64 --out codecs/photographs
"""


@dataclass(frozen=True)
class Options:
    out: str
    """Folder to write to."""
    data: str = "cifar10:train"
    """Images to learn from: cifar10:train, a file of them (a grid as .webp or .png, .bin, .parquet) or a
    folder of images."""
    side: int = 32
    """Pixels along a side of an image."""
    shape: VqConfig = field(
        default_factory=lambda: VqConfig(64, "1-2-2", blocks=1, latent=64, codes=1024)
    )
    steps: int = 5000
    """Optimiser steps."""
    batch: int = 64
    """Images per step."""
    lr: float = 1e-3
    """Learning rate."""
    realism: float = 0.5
    """How much a critic of patches has a say beside squared errors, after a third of the steps: details
    that the codes do not keep are made up instead of blurred. 0 for squared errors alone."""
    limit: int | None = None
    """Learn from at most this many images."""
    seed: int = 0
    """Decides the initial weights and the order of the images."""
    device: str = "auto"
    """auto, cpu or cuda."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm codec", description=_DESCRIPTION)
    out = Path(options.out)
    if out.exists():
        raise UserError(f"{out} already exists; choose another folder or remove it")
    check_writable(out, make=False)
    if options.side % options.shape.shrink:
        raise UserError(f"--side must be a multiple of {options.shape.shrink}, got {options.side}")
    device = pick_device(options.device)
    with progress(f"reading {options.data}") as show:
        rows = load_images(
            options.data, Pixels(options.side), mirrored=True, limit=options.limit, on_progress=show
        )
    last = CodecStep(0, 0.0, 0.0)
    with progress("training") as show:

        def note(now: CodecStep) -> None:
            nonlocal last
            last = now
            show(now.step, options.steps)

        codec = train_codec(
            rows, options.shape, steps=options.steps, batch=options.batch, lr=options.lr,
            realism=options.realism, seed=options.seed, device=device, on_step=note,
        )  # fmt: skip
    save_codec(codec, out)
    cells = (options.side // options.shape.shrink) ** 2
    console().print(
        f"{options.shape.codes} codes, {cells} to an image, {last.in_use:.0%} in use; mean squared error "
        f"{last.error:.4f} on [-1, 1] -> {out}",
    )  # fmt: skip
