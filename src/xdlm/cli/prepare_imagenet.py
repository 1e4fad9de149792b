"""`xdlm prepare imagenet`: encode images once, into shards of codes that training reads from disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xdlm.cli.options import parse
from xdlm.cli.progress import progress
from xdlm.data import ImageFolder, Views, prepare_codes
from xdlm.errors import UserError
from xdlm.files import check_writable
from xdlm.tokens import Codes
from xdlm.tokens.vq import load_codec
from xdlm.training.device import pick_device

_DESCRIPTION = """Encode a folder of images with a folder for each class, as ImageNet comes, into a
folder of memory-mapped shards of codes. Classes are numbered in the order of the folders' names. Each image
gives ten rows (corners and middle of a square that is a little larger, and their mirror images) or two (its
middle and the mirror image of that), as LlamaGen makes them. An interrupted run goes on where it stopped.

examples:
  xdlm import --from llamagen vq_ds16_c2i.pt --out codecs/vq16
  xdlm prepare imagenet --data ILSVRC2012/train --codec codecs/vq16 --out prepared/imagenet --workers 16
  xdlm prepare imagenet --data ILSVRC2012/val --codec codecs/vq16 --out prepared/imagenet-val --crops centre
  xdlm train recipes/imagenet/xdlm-k0.1.yaml
"""


@dataclass(frozen=True)
class Options:
    data: str
    """Folder with a folder of images (.jpeg, .png, .webp, .bmp) for each class."""
    codec: str
    """Folder of the codec: from `xdlm import --from llamagen`, or `xdlm codec`."""
    out: str
    """Folder to write to."""
    crops: Literal["ten", "centre"] = "ten"
    """Views of an image: ten crops, or the middle and its mirror image."""
    side: int = 256
    """Pixels along a side of a view."""
    widen: float = 1.1
    """ten: the square that views are cut from is so many times as large."""
    limit: int | None = None
    """Use only so many images of each class."""
    workers: int = 4
    """Threads that read and cut images."""
    device: str = "auto"
    """auto, cpu or cuda: where the codec runs."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm prepare imagenet", description=_DESCRIPTION)
    views = Views(options.side, options.crops, options.widen)
    check_writable(Path(options.out), make=False)
    shrink = load_codec(Path(options.codec)).config.shrink
    if options.side % shrink:
        raise UserError(f"--side must be a multiple of {shrink}, got {options.side}")
    codes = Codes.open(options.codec, (options.side // shrink) ** 2).to(pick_device(options.device))
    with progress(f"looking through {options.data}") as show:
        folder = ImageFolder.open(options.data, limit=options.limit, on_progress=show)
    with progress(f"encoding {options.data}") as show:
        made = prepare_codes(
            folder, codes, options.out, views=views, workers=options.workers, on_progress=show
        )
    rows = sum(shard.documents for shard in made.shards)
    print(
        f"{sum(made.counts):,} images of {len(made.classes):,} classes, {rows:,} rows of {made.length} "
        f"codes in {len(made.shards)} shards -> {options.out}"
    )
