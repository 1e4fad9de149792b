"""`xdlm paint`: generate images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xdlm.cli.options import parse
from xdlm.cli.progress import console, progress
from xdlm.config import RunConfig
from xdlm.data.cifar import CLASSES
from xdlm.data.image_rows import CIFAR
from xdlm.errors import UserError, check_seed
from xdlm.files import check_file, write_atomic
from xdlm.images import BATCH, ImageModel, ImageSample, load_image_model
from xdlm.report.captions import captioned
from xdlm.report.colours import LOOKS
from xdlm.report.comparison import method_name
from xdlm.report.exporting import check_target, export
from xdlm.report.grid import image_grid, png, zoomed
from xdlm.report.recording import Recording
from xdlm.report.strip import picked_steps, strips
from xdlm.sampling import Filter, Guidance, SamplerConfig, Trajectory
from xdlm.tokens import ImageTokenizer

_DESCRIPTION = """Generate images with one or several models, as a picture of them all.

Models that are asked together get the same seed and labels. --strip shows how each one's first image came
about, with a row below it that marks what pixels did: unmasked (green), refined (blue), remasked (red).

examples:
  xdlm paint --model runs/cpu-pixels --n 20 --out images.png
  xdlm paint --model runs/cifar10-mdlm runs/cifar10-xdlm-k0.1 --guidance 2 --steps 8 --strip strip.png
  xdlm paint --model runs/cifar10-udlm --label 3 --n 9 --steps 64 --trajectory cats.gif
  xdlm paint --n 4 --trajectory images.json && xdlm view images.json
"""


@dataclass(frozen=True)
class Options:
    model: tuple[str, ...] = ("runs/cpu-pixels",)
    """Checkpoint folders or run folders of models of images."""
    n: int = 20
    """Images from each model."""
    label: tuple[int, ...] = ()
    """Classes, taken in turn; by default all of them. -1 stands for none."""
    steps: int = 32
    """Sampling steps; the final denoise comes on top."""
    guidance: float = 1.0
    """Scale of guidance by the class; 1 is off, 2 the paper's."""
    schedule: str = "constant"
    """How the scale changes on the way: constant, rising, falling or middle."""
    temperature: float = 1.0
    """Below 1 is more careful, 0 takes the most likely level."""
    top_p: float = 1.0
    """Draw among the most likely levels that together have this probability."""
    seed: int = 0
    """Same seed, same images."""
    batch: int = BATCH
    """Images that are sampled together."""
    out: str = "images.png"
    """The picture of all images, those of each model below those of the one before, under its name."""
    columns: int = 10
    """Images in a row of it; with ten classes in turn, a column is a class."""
    strip: str | None = None
    """A picture of how the first image of each model came about."""
    frames: int = 9
    """States in a strip."""
    trajectory: str | None = None
    """Write how the images of the first model came about: as data (.json, see `xdlm view`), as a page that
    stands alone (.html), as a film (.gif), or the first of them as a drawing (.svg). Data and pages know no
    codec: there a code is one colour."""
    zoom: int = 2
    """Every pixel is drawn so many pixels wide."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights (ema), or the last ones of training (raw)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the trunk."""
    device: str = "auto"
    """auto, cpu or cuda."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm paint", description=_DESCRIPTION)
    config = _checked(options)
    models = [
        load_image_model(
            name, device=options.device, weights=options.weights, precision=options.precision
        )
        for name in options.model
    ]
    if len({model.tokenizer.side for model in models}) > 1:
        raise UserError("models painted together must make images of one size")
    drawn = [_draw(model, config, options) for model in models]
    names = _names(models, options.model)
    pages = [
        zoomed(image_grid(sample.images, columns=options.columns), options.zoom) for sample in drawn
    ]
    heads = _classes(models[0].config, options)
    picture = pages[0] if len(pages) == 1 else captioned(pages, names, heads=heads)
    write_atomic(Path(options.out), png(picture))
    paths = [
        (sample.trajectory, model.tokenizer)
        for sample, model in zip(drawn, models, strict=True)
        if sample.trajectory is not None
    ]
    if options.strip is not None:
        write_atomic(Path(options.strip), png(_strip(paths, names, options)))
    if options.trajectory is not None:
        recording = Recording.of_images(*paths[0], _details(models[0], options, drawn[0]))
        export(recording, Path(options.trajectory), title="How the images came about")
    for name, model, sample in zip(options.model, models, drawn, strict=True):
        console().print(
            f"{name} ({model.weights} weights): {options.steps} steps, {sample.nfe} forward passes",
            style="dim",
        )  # fmt: skip


def _checked(options: Options) -> SamplerConfig:
    if not options.model:
        raise UserError("--model needs at least one folder")
    check_seed(options.seed, name="--seed")
    if options.trajectory is not None:
        check_target(Path(options.trajectory))
    for picture in (options.out, options.strip):
        if picture is not None:
            _check_picture(Path(picture))
    if min(options.columns, options.zoom, options.batch) < 1 or options.frames < 2:
        raise UserError("--columns, --zoom and --batch must be at least 1, and --frames 2")
    return SamplerConfig(
        options.steps, Filter(options.temperature, options.top_p),
        guidance=Guidance(options.guidance, options.schedule),
    )  # fmt: skip


def _check_picture(file: Path) -> None:
    check_file(file)
    if file.suffix.lower() != ".png" and (file.is_file() or not file.exists()):  # or a device
        raise UserError(f"'{file}' does not end in .png, and pictures are PNG files")


def _draw(model: ImageModel, config: SamplerConfig, options: Options) -> ImageSample:
    labels = None
    if options.label:
        labels = [options.label[i % len(options.label)] for i in range(max(options.n, 0))]
    with progress("painting") as show:
        return model.sample(
            options.n, labels=labels, config=config, seed=options.seed, batch=options.batch,
            trajectory=options.strip is not None or options.trajectory is not None, on_step=show,
        )  # fmt: skip


def _names(models: Sequence[ImageModel], folders: Sequence[str]) -> list[str]:
    """Of methods; of folders, where two are of one method."""
    names = [method_name(model.config.process) for model in models]
    return names if len(set(names)) == len(names) else [Path(folder).name for folder in folders]


def _classes(config: RunConfig, options: Options) -> Sequence[str]:
    """What the columns are, where each is a class whose name is known."""
    known = CLASSES if config.data.train.startswith(f"{CIFAR}:") else ()
    return known if len(known) == options.columns and not options.label else ()


def _strip(
    paths: Sequence[tuple[Trajectory, ImageTokenizer]], names: Sequence[str], options: Options
) -> NDArray[np.uint8]:
    """States of every model's first image after numbers of steps, and what tokens did between them."""
    blocks = [zoomed(block, options.zoom) for block in strips(paths, frames=options.frames)]
    steps = picked_steps(paths[0][0].steps, options.frames)
    legend = {look.name: look.colour for look in LOOKS.values()}
    return captioned(
        blocks, names, title="step", heads=[str(step) for step in steps], legend=legend
    )


def _details(model: ImageModel, options: Options, drawn: ImageSample) -> dict[str, str]:
    process = model.config.process
    return {
        "model": f"{options.model[0]}, step {model.step}, {model.weights} weights",
        "noise": process.kind + (f", k = {process.k}" if process.k is not None else ""),
        "classes": ", ".join(map(str, drawn.labels.tolist())),
        "steps": str(options.steps),
        "forward passes": str(drawn.nfe),
        "guidance": f"{options.guidance}, {options.schedule}",
        "seed": str(options.seed),
        "temperature": str(options.temperature),
        "top-p": str(options.top_p),
    }
