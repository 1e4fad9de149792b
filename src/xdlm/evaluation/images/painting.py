"""A model's images measured against a data set, as records."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from xdlm import __version__
from xdlm.data import ImageRows
from xdlm.errors import UserError
from xdlm.evaluation.images.features import FeatureSet, batches_of, digest_of, features_of
from xdlm.evaluation.images.inception import Inception
from xdlm.evaluation.images.scores import InceptionScore, fid, fid_error, kid, precision_recall
from xdlm.evaluation.provenance import commit, provenance
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.subject import Loaded, Progress, unseen
from xdlm.sampling import SamplerConfig
from xdlm.tokens import Codes
from xdlm.training.device import describe

#: What records call the network that the features are of.
NETWORK = "inception-2015"
#: What metrics of a data set's own images begin with.
REAL = "real_"


class Drawn(Protocol):
    """Images [b, side, side, 3] and the largest number of forward passes that one took."""

    @property
    def images(self) -> NDArray[np.uint8]: ...

    @property
    def nfe(self) -> int: ...


class Reference(NamedTuple):
    """The data set that images are compared with, its features where the network is."""

    source: str
    digest: str
    features: FeatureSet
    limit: int | None = None
    """At most how many of its images, where that was said."""


def plan_painting(
    model: Loaded,
    name: str,
    network: nn.Module,
    reference: Reference,
    *,
    n: int,
    config: SamplerConfig,
    seed: int,
) -> EvalRecord:
    """A record of everything but the outcome."""
    return EvalRecord(
        metric="", value=None, stderr=None, n=n, seed=seed, model=name, **provenance(model),
        data=reference.source, data_sha256=reference.digest, length=model.config.data.length,
        steps=config.steps, sampler="ancestral", temperature=config.filter.temperature,
        top_p=config.filter.top_p, guidance=config.guidance.scale,
        guidance_schedule=config.guidance.schedule, judge=NETWORK, judge_sha256=digest_of(network),
    )  # fmt: skip


class RealImages(NamedTuple):
    """Images [b, side, side, 3] that nobody made."""

    images: NDArray[np.uint8]
    nfe: int = 0


def plan_real(
    source: str,
    codes: Codes | None,
    rows: ImageRows,
    network: nn.Module,
    reference: Reference,
    *,
    seed: int,
    device: torch.device,
) -> EvalRecord:
    """The same for the images of a data set, as they are or as they come back from a codec."""
    codec = "" if codes is None else codes.sha256
    digest = hashlib.sha256(f"{rows.digest} {codec}".encode()).hexdigest()
    return EvalRecord(
        metric=REAL, value=None, stderr=None, n=len(rows), seed=seed,
        model=source if codes is None else f"{source} through {codes.folder}", step=0, weights="none",
        dtype="float32", config={}, tokenizer_sha256=digest, xdlm=__version__, commit=commit(),
        torch=torch.__version__, device=describe(device), data=reference.source,
        data_sha256=reference.digest, length=rows.length, judge=NETWORK,
        judge_sha256=digest_of(network),
    )  # fmt: skip


def real_images(rows: ImageRows, codes: Codes | None, batch: int) -> Iterator[RealImages]:
    for images in batches_of(rows, batch):
        yield RealImages(images if codes is None else codes.decode(codes.encode(images)))


def metrics_of(network: nn.Module, plan: EvalRecord) -> list[str]:
    """What `measure` finds with a network, in that order."""
    scored = isinstance(network, Inception) and network.classes is not None
    names = ("fid", "kid", "precision", "recall", *(("inception_score",) if scored else ()))
    return [f"{plan.metric}{name}" for name in names]


def measure(
    plan: EvalRecord,
    network: nn.Module,
    reference: Reference,
    drawn: Iterator[Drawn],
    *,
    progress: Progress = unseen,
) -> list[EvalRecord]:
    """The distances of drawn images from the reference: FID over all images of both; KID, precision and
    recall over those whose features are kept; the Inception Score where the network has classes."""
    most, began, waited = 0, time.perf_counter(), 0.0

    def images() -> Iterator[NDArray[np.uint8]]:
        nonlocal most, waited
        asked = time.perf_counter()
        for part in drawn:
            most, waited = max(most, part.nfe), waited + time.perf_counter() - asked
            yield part.images
            asked = time.perf_counter()

    score = None
    if isinstance(network, Inception) and network.classes is not None:
        score = InceptionScore(plan.n, network.logits)
    with progress(plan.model if plan.steps is None else f"{plan.steps} steps") as show:
        found = features_of(
            network, images(), n=plan.n, on_images=lambda done: show(done, plan.n),
            on_features=None if score is None else score.add,
        )  # fmt: skip
    seen = time.perf_counter()
    real, found = reference.features, found.to(next(network.parameters()).device)
    here, there = found.kept, real.kept
    kernel = kid(here, there)
    some = min(len(here), len(there))
    shares = precision_recall(there[:some], here[:some])
    about = {"reference_n": float(real.law.n), "kept": float(len(found.kept))}
    if reference.limit is not None:
        about["reference_limit"] = float(reference.limit)
    plan = replace(plan, nfe=float(most), details=about)
    distance, error = fid(real.law, found.law), fid_error(real.law, found.law, here)
    if not math.isfinite(distance):
        raise UserError(f"the distance of {plan.model} from {reference.source} is no number")
    took = {  # told once: all are of the same images
        "seconds": time.perf_counter() - began, "seconds_drawing": waited,
        "seconds_scoring": time.perf_counter() - seen,
    }  # fmt: skip
    values = [(distance, error), (kernel.value, kernel.stderr), (shares.precision, None),
              (shares.recall, None)]  # fmt: skip
    if score is not None:
        values.append(score.result())
    records = [
        replace(plan, metric=metric, value=value, stderr=stderr)
        for metric, (value, stderr) in zip(metrics_of(network, plan), values, strict=True)
    ]
    return [replace(records[0], details=about | took), *records[1:]]
