"""Either sampler by its settings, on rows with holes of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import nan
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from xdlm.errors import UserError, did_you_mean
from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.sampling.ancestral import Last, SamplerConfig, sample
from xdlm.sampling.confidence import ConfidenceConfig, decode
from xdlm.sampling.filters import Filter
from xdlm.sampling.result import Sample
from xdlm.sampling.trajectory import Trajectory

Config = SamplerConfig | ConfidenceConfig
#: Tokens that are sampled together.
BATCH_TOKENS = 32_768


class How(TypedDict, total=False):
    """How to sample: all that the fields of either configuration say, and which it is."""

    sampler: Literal["ancestral", "confidence"]
    steps: int
    temperature: float
    top_p: float
    last: Last
    impl: str
    block_length: int | None
    guidance: float
    confidence: str
    refresh: int | None


_SAMPLERS: dict[str, tuple[str, ...]] = {
    "ancestral": ("last", "impl"),
    "confidence": ("block_length", "guidance", "confidence", "refresh"),
}
_SHARED = ("steps", "temperature", "top_p")


def configure(how: Mapping[str, Any], process: NoiseProcess) -> Config:
    """The configuration that the settings describe; confidence decoding rewrites as much as the process
    has uniform noise. A setting that the sampler would ignore is an error."""
    given = dict(how)
    sampler = given.pop("sampler", "ancestral")
    if sampler not in _SAMPLERS:
        raise UserError(f"unknown sampler '{sampler}'{did_you_mean(sampler, _SAMPLERS)}")
    known = (*_SHARED, *(name for own in _SAMPLERS.values() for name in own))
    for name in given:
        if name not in known:
            raise UserError(f"unknown setting '{name}'{did_you_mean(name, known)}")
        if name not in (*_SHARED, *_SAMPLERS[sampler]):
            raise UserError(f"{name} has no meaning for the {sampler} sampler; leave it out")
    reshape = Filter(given.pop("temperature", 1.0), given.pop("top_p", 1.0))
    if sampler == "ancestral":
        return SamplerConfig(filter=reshape, **given)
    return ConfidenceConfig(filter=reshape, k=uniform_share(process), **given)


def uniform_share(process: NoiseProcess) -> float:
    """How much of the noise is uniform, at half time: k for mixed noise, 0 for masks alone."""
    at = process.coefs(0.5)
    return round(float(process.vocab.size * at.b_tok / (1 - at.alpha)), 12)


class Part(NamedTuple):
    """Rows that were written together, by number, and what came of them."""

    rows: list[int]
    sample: Sample


def write(
    denoiser: Denoiser,
    process: NoiseProcess,
    rows: Sequence[Sequence[int | None]],
    *,
    config: Config,
    seed: int = 0,
    index: Sequence[int] | None = None,
    stop_ids: Sequence[int] = (),
    batch_tokens: int = BATCH_TOKENS,
    record: bool = False,
    on_step: Callable[[int, int], None] | None = None,
    on_frame: Callable[[Tensor], None] | None = None,
) -> list[Part]:
    """Fill the holes of rows; None is a hole, and the rest never changes.

    Only rows of one length, with as many holes, go through the model together: nothing is padded, so that
    no backbone needs to know of padding, and a row is the same whatever comes with it. Row i is a pure
    function of (seed, index[i]), where `index` counts from 0 unless given.
    """
    numbers = range(len(rows)) if index is None else index
    groups = _groups(rows, batch_tokens)
    parts = []
    for done, group in enumerate(groups):
        given = torch.tensor([[0 if i is None else i for i in rows[row]] for row in group])
        frozen = torch.tensor([[i is not None for i in rows[row]] for row in group])

        def show(step: int, steps: int, done: int = done) -> None:
            if on_step is not None:
                on_step(done * steps + step, len(groups) * steps)

        args: dict[str, Any] = {
            "given": given, "frozen": frozen, "seed": seed,
            "index": torch.tensor([numbers[row] for row in group]),
            "stop_ids": stop_ids, "record": record, "on_step": show, "on_frame": on_frame,
        }  # fmt: skip
        if isinstance(config, ConfidenceConfig):
            drawn = decode(denoiser, process, config=config, **args)
        else:
            batch, length = given.shape
            drawn = sample(denoiser, process, batch=batch, length=length, config=config, **args)
        parts.append(Part(group, drawn))
    return parts


def _groups(rows: Sequence[Sequence[int | None]], batch_tokens: int) -> list[list[int]]:
    """Numbers of rows of one shape, at most so many tokens at a time; the longest first, so that what
    does not fit into memory says so at once."""

    def shape(row: int) -> tuple[int, int]:
        return len(rows[row]), rows[row].count(None)

    groups = []
    for (length, _), same in groupby(sorted(range(len(rows)), key=shape, reverse=True), shape):
        group, size = list(same), max(batch_tokens // max(length, 1), 1)
        groups += [group[i : i + size] for i in range(0, len(group), size)]
    return groups


def join_trajectories(paths: Sequence[Trajectory]) -> Trajectory:
    """Of rows of one length, one behind the other; those that ended sooner stay as they were."""
    longest = max(paths, key=lambda path: path.steps)
    frames = [
        torch.cat([path.frames, path.frames[-1:].expand(longest.steps - path.steps, -1, -1)])
        for path in paths
    ]
    probs = [
        torch.nn.functional.pad(path.probs, (0, 0, 0, 0, 0, longest.steps - path.steps), value=nan)
        for path in paths
        if path.probs is not None
    ]
    assert len(probs) == len(paths), "samplers note the probabilities of what they record"
    return replace(longest, frames=torch.cat(frames, dim=1), probs=torch.cat(probs, dim=1))
