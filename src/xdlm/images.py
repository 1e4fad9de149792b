"""The Python face of image models: load, sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xdlm.config import RunConfig
from xdlm.errors import UserError, check_known, check_seed, check_whole
from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.sampling import SamplerConfig, Trajectory, sample
from xdlm.sampling.writing import join_trajectories
from xdlm.tokens import Codes, ImageTokenizer
from xdlm.training.checkpoint import save_weights
from xdlm.training.device import pick_device
from xdlm.training.trained import (
    Precision,
    Weights,
    bundled,
    describe,
    find_model,
    read_trained,
)

MAX_IMAGES = 1_000_000
#: Images that are sampled together.
BATCH = 64
#: Labels of a result that its repr shows.
_SHOWN = 8


@dataclass(frozen=True)
class ImageSample:
    """Images [n, side, side, 3] of bytes and their classes [n], -1 for none. `nfe` is the largest number of
    forward passes that an image took; `trajectory` holds every step, if it was asked for."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    nfe: int
    trajectory: Trajectory | None

    def __repr__(self) -> str:
        shape, labels = list(self.images.shape), self.labels[:_SHOWN].tolist()
        more = ", ..." if len(self.labels) > _SHOWN else ""
        return f"ImageSample(images {shape}, labels [{', '.join(map(str, labels))}{more}], nfe={self.nfe})"


@dataclass(frozen=True)
class ImageModel:
    """A denoiser of images with its noise process. `weights` says which ones it runs on."""

    denoiser: Denoiser
    process: NoiseProcess
    tokenizer: ImageTokenizer
    config: RunConfig
    weights: str
    step: int

    def __repr__(self) -> str:
        side, about = self.tokenizer.side, describe(self.denoiser, self.weights, self.step)
        return f"ImageModel({self.process}, images of {side} x {side}, {about})"

    def labels(self, n: int) -> list[int]:
        """Classes in turn, so that they are equally frequent; -1 for a model without classes."""
        n_classes = self.denoiser.n_classes
        return [i % n_classes if n_classes else -1 for i in range(n)]

    def check_guidance(self, scale: float) -> None:
        """Raise if guidance is asked of a model without classes, which has nothing to lead away from."""
        if scale != 1 and not self.denoiser.n_classes:
            raise UserError("guidance needs a model with classes, and this one was built without")

    def sample(
        self,
        n: int = 1,
        *,
        labels: Sequence[int] | None = None,
        config: SamplerConfig | None = None,
        seed: int = 0,
        batch: int = BATCH,
        trajectory: bool = False,
        on_step: Callable[[int, int], None] | None = None,
    ) -> ImageSample:
        """Draw `n` images, each a pure function of (seed, its number, its label). The labels are the
        classes in turn, unless given; -1 stands for none."""
        parts = list(
            self.draws(
                n, labels=labels, config=config, seed=seed, batch=batch, trajectory=trajectory,
                on_step=on_step,
            )
        )  # fmt: skip
        paths = [part.trajectory for part in parts if part.trajectory is not None]
        return ImageSample(
            np.concatenate([part.images for part in parts]),
            np.concatenate([part.labels for part in parts]),
            max(part.nfe for part in parts),
            join_trajectories(paths) if paths else None,
        )

    def draws(
        self,
        n: int,
        *,
        labels: Sequence[int] | None = None,
        config: SamplerConfig | None = None,
        seed: int = 0,
        batch: int = BATCH,
        trajectory: bool = False,
        on_step: Callable[[int, int], None] | None = None,
    ) -> Iterator[ImageSample]:
        """The same, batch by batch, for sets that are too large to hold."""
        check_whole("n", n)
        check_seed(seed)
        if not 1 <= n <= MAX_IMAGES or batch < 1:
            raise UserError(
                f"n must lie in 1..{MAX_IMAGES:,} and batch be at least 1, got {n}, {batch}"
            )
        if config is not None:
            self.check_guidance(config.guidance.scale)
        classes = self.labels(n) if labels is None else list(labels)
        if len(classes) != n:
            raise UserError(f"got {len(classes)} labels for {n} images")
        n_batches = -(-n // batch)
        for number in range(n_batches):
            index = torch.arange(number * batch, min((number + 1) * batch, n))
            label = torch.tensor([classes[i] for i in index])

            def show(step: int, steps: int, number: int = number) -> None:
                if on_step is not None:
                    on_step(number * steps + step, n_batches * steps)

            drawn = sample(
                self.denoiser, self.process, batch=len(index), length=self.tokenizer.length,
                config=config, seed=seed, index=index, label=self._told(label), record=trajectory,
                on_step=show,
            )  # fmt: skip
            images = self.tokenizer.decode(drawn.tokens.cpu().numpy())
            yield ImageSample(images, label.numpy(), int(drawn.nfe.max()), drawn.trajectory)

    def save(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a folder that `load_image_model` reads: these weights alone, cast to `dtype` if given. A
        model of codes names its codec there, which stays where it is."""
        save_weights(
            Path(folder), self.denoiser, self.tokenizer, self.config, step=self.step,
            weights=self.weights, dtype=dtype,
        )  # fmt: skip

    def _told(self, label: Tensor) -> Tensor | None:
        """What the model is told: nothing if it has no classes, and else also labels of -1."""
        return None if not self.denoiser.n_classes and bool((label < 0).all()) else label


def load_image_model(
    name: str | Path,
    *,
    device: str | torch.device = "auto",
    weights: Weights = "ema",
    precision: Precision = "float32",
) -> ImageModel:
    """A model of images, from a checkpoint or a run folder; `weights` and `precision` as in `xdlm.load`."""
    check_known("weights", weights, get_args(Weights))
    check_known("precision", precision, get_args(Precision))
    if bundled(name) is None and not Path(name).is_dir():  # of images none is bundled
        raise UserError(
            f"no model of images at {name}; train one first, as with `xdlm train recipes/cpu-pixels.yaml`"
        )
    checkpoint = find_model(name)
    trained = read_trained(
        checkpoint,
        weights=weights,
        device=pick_device(str(device)),
        dtype=getattr(torch, precision),
    )
    if not isinstance(trained.tokenizer, ImageTokenizer) or trained.process is None:
        raise UserError(f"{name} is a text model, and images need an image model")
    tokenizer = trained.tokenizer
    if isinstance(tokenizer, Codes):
        tokenizer.to(trained.denoiser.device)
    return ImageModel(
        trained.denoiser, trained.process, tokenizer, checkpoint.config, trained.weights,
        checkpoint.step,
    )  # fmt: skip
