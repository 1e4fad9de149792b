"""Features of sets of images, and their mean and covariance, added up batch by batch in float64."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from xdlm.data import ImageRows
from xdlm.errors import UserError
from xdlm.files import write_atomic
from xdlm.tokens import Pixels

#: Raised when anything changes that the numbers in a file of statistics depend on.
_FORMAT = 3
#: Threads that read images.
_READERS = 4
#: Images that go through the network together, on a CPU and on a GPU.
BATCH, GPU_BATCH = 64, 256
#: Features of a set that are kept, for scores that compare images one by one; and what decides which.
KEPT, _CHOICE = 10_000, 0


@dataclass(frozen=True)
class Gaussian:
    """Mean [d] and covariance [d, d] of n feature vectors, float64."""

    n: int
    mean: Tensor
    covariance: Tensor

    def to(self, device: torch.device) -> Gaussian:
        return Gaussian(self.n, self.mean.to(device), self.covariance.to(device))

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues [d] of the covariance, the smallest first, and eigenvectors [d, d] in columns."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return values, vectors

    @cached_property
    def root(self) -> Tensor:
        """Of the covariance."""
        return root_of(*self.spectrum)


def root_of(values: Tensor, vectors: Tensor) -> Tensor:
    """Of a symmetric matrix, from its eigenvalues and eigenvectors."""
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


class Running:
    """Mean and covariance of vectors that come in batches: what is kept is their number n, their mean m and
    the scatter M = sum (x - m)(x - m)'. Two parts join as (Chan et al. 1979)

        M = M1 + M2 + (m2 - m1)(m2 - m1)' n1 n2/n

    so that no large sums are subtracted from each other."""

    def __init__(self) -> None:
        self.n = 0
        self._mean = self._scatter = torch.zeros(())

    def add(self, features: Tensor) -> None:
        """A batch [b, d]."""
        if len(features) == 0:
            return
        batch = features.double()
        mean = batch.mean(0)
        inner = batch - mean
        scatter = inner.T @ inner
        if self.n == 0:
            self.n, self._mean, self._scatter = len(batch), mean, scatter
            return
        total = self.n + len(batch)
        gap = mean - self._mean
        self._scatter += scatter + torch.outer(gap, gap) * (self.n * len(batch) / total)
        self._mean += gap * (len(batch) / total)
        self.n = total

    def gaussian(self) -> Gaussian:
        if self.n < 2:
            raise UserError(f"a covariance needs at least 2 images, got {self.n}")
        return Gaussian(self.n, self._mean.clone(), self._scatter / (self.n - 1))


@dataclass(frozen=True)
class FeatureSet:
    """What scores need to know of a set of images: the law of all features, and some of them one by one
    [k, d], float32, drawn at random and in random order: a set may be sorted by class."""

    law: Gaussian
    kept: Tensor

    def to(self, device: torch.device) -> FeatureSet:
        return FeatureSet(self.law.to(device), self.kept.to(device))


@torch.no_grad()
def features_of(
    network: nn.Module,
    batches: Iterable[NDArray[np.uint8]],
    *,
    n: int,
    kept: int = KEPT,
    on_images: Callable[[int], None] | None = None,
    on_features: Callable[[Tensor], None] | None = None,
) -> FeatureSet:
    """The features of `n` images [b, side, side, 3] in all, batch by batch; `kept` of them are kept, and
    all are shown to `on_features`."""
    device = next(network.parameters()).device
    running, some = Running(), torch.empty(0)
    rank = shuffled(n)  # those of rank below `kept` are kept, in that order
    for images in batches:
        features = network(torch.from_numpy(np.ascontiguousarray(images)).to(device))
        if not bool(features.isfinite().all()):
            raise UserError("the features of some images are not finite")
        if running.n == 0:
            some = torch.empty(min(kept, n), features.shape[1])
        place = rank[running.n : running.n + len(features)]
        some[place[place < kept]] = features[(place < kept).to(device)].float().cpu()
        running.add(features)
        if on_features is not None:
            on_features(features)
        if on_images is not None:
            on_images(running.n)
    assert running.n == n, f"{running.n} images came, not {n}"
    return FeatureSet(running.gaussian().to(torch.device("cpu")), some)


def shuffled(n: int) -> Tensor:
    """The numbers 0..n-1 in an order that is always the same."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(_CHOICE))


def reference_features(
    network: nn.Module,
    rows: ImageRows,
    *,
    cache: Path | None = None,
    kept: int = KEPT,
    on_images: Callable[[int], None] | None = None,
) -> FeatureSet:
    """The features of a data set. With a `cache` folder they are read from there if the same images were
    seen by the same weights before, and else written there. The file's name is a hash of both."""
    key = reference_key(network, rows, kept)
    file = None if cache is None else cache / f"features-{key[:16]}.safetensors"
    if file is not None and file.is_file():
        return read_features(file, key)
    batch = batch_on(next(network.parameters()).device)
    found = features_of(
        network, batches_of(rows, batch), n=len(rows), kept=kept, on_images=on_images
    )
    if file is not None:
        write_features(file, found, key)
    return found


def batch_on(device: torch.device) -> int:
    return GPU_BATCH if device.type == "cuda" else BATCH


def batches_of(rows: ImageRows, batch: int = BATCH) -> Iterator[NDArray[np.uint8]]:
    """All images of a data set, in their order. Those of a folder are decoded by several threads, some
    batches ahead."""

    def read(start: int) -> NDArray[np.uint8]:
        return Pixels(rows.side).decode(rows.take(range(start, min(start + batch, len(rows)))))

    starts = iter(range(0, len(rows), batch))
    with ThreadPoolExecutor(_READERS) as pool:
        waiting = deque(pool.submit(read, start) for start in islice(starts, 2 * _READERS))
        while waiting:
            images = waiting.popleft().result()
            waiting.extend(pool.submit(read, start) for start in islice(starts, 1))
            yield images


def reference_key(network: nn.Module, rows: ImageRows, kept: int) -> str:
    """Hash of all that decides the features: the images, the weights, how many are kept."""
    what = f"{_FORMAT} {rows.digest} {digest_of(network)} {kept}"
    return hashlib.sha256(what.encode()).hexdigest()


def digest_of(network: nn.Module) -> str:
    """Hash of a network's weights."""
    digest = hashlib.sha256()
    for name, parameter in sorted(network.state_dict().items()):
        digest.update(name.encode() + parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def write_features(file: Path, features: FeatureSet, key: str) -> None:
    law = features.law
    tensors = {"mean": law.mean, "covariance": law.covariance, "kept": features.kept}
    on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    about = {"key": key, "n": str(law.n), "content": _content(on_host)}
    write_atomic(file, save(on_host, about))


def _content(tensors: Mapping[str, Tensor]) -> str:
    """Hash of what is in a file: one wrong number would be a wrong distance of everything measured."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def read_features(file: Path, key: str) -> FeatureSet:
    """What `write_features` wrote under the same key."""
    try:
        with safe_open(file, framework="pt") as opened:
            meta = opened.metadata() or {}
            if meta.get("key") != key:
                raise UserError(f"{file} holds features of other images or weights; delete it")
            tensors = {name: opened.get_tensor(name) for name in ("mean", "covariance", "kept")}
            if meta["content"] != _content(tensors):
                raise ValueError("its numbers are not those that were written")
            law = Gaussian(int(meta["n"]), tensors["mean"], tensors["covariance"])
            return FeatureSet(law, tensors["kept"])
    except (SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is damaged ({error}); delete it") from error
