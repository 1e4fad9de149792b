"""Either sampler, by its settings, on rows of any lengths that have holes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from xdlm.sampling.grouping import group_rows
from xdlm.sampling.result import Sample
from xdlm.sampling.trajectory import Trajectory

Config = SamplerConfig | ConfidenceConfig
#: Tokens that are sampled together.
BATCH_TOKENS = 32_768


class How(TypedDict, total=False):
    """How to sample: which sampler, and the settings of its configuration."""

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
    """How much of the noise is uniform, at half time: k for mixed noise, 0 for masks alone. It is of noise
    over all states, the mask included: noise that reaches the mask less than that counts as all uniform."""
    at = process.coefs(0.5)
    return min(round(float(process.vocab.size * at.b_tok / (1 - at.alpha)), 12), 1.0)


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

    Rows with as many holes go through the model together, the shorter ones with padding behind them that
    is not looked at; only those of one length, where the backbone takes no padding or states are
    remembered (`refresh`). Row i is a pure function of (seed, index[i]), where `index` counts from 0 unless
    given: up to the model's own rounding it is the same whatever comes with it.
    """
    numbers = range(len(rows)) if index is None else index
    _check(rows, numbers, process.vocab.size)
    padded = denoiser.takes_padding and getattr(config, "refresh", None) is None
    holes = [row.count(None) for row in rows]
    groups = group_rows([len(row) for row in rows], batch_tokens, padded=padded, kinds=holes)
    parts = []
    for done, group in enumerate(groups):

        def show(step: int, steps: int, done: int = done) -> None:
            if on_step is not None:
                on_step(done * steps + step, len(groups) * steps)

        args: dict[str, Any] = {
            **_tensors([rows[row] for row in group]), "seed": seed,
            "index": torch.tensor([numbers[row] for row in group]),
            "stop_ids": stop_ids, "record": record, "on_step": show, "on_frame": on_frame,
        }  # fmt: skip
        if isinstance(config, ConfidenceConfig):
            drawn = decode(denoiser, process, config=config, **args)
        else:
            batch, length = args["given"].shape
            drawn = sample(denoiser, process, batch=batch, length=length, config=config, **args)
        parts.append(Part(group, drawn))
    return parts


def _check(rows: Sequence[Sequence[int | None]], numbers: Sequence[int], size: int) -> None:
    """Refuse what would end the process on a GPU."""
    if len(numbers) != len(rows):
        raise UserError(f"index numbers {len(numbers)} rows, and there are {len(rows)}")
    for token in {token for row in rows for token in row if token is not None}:
        if not 0 <= token < size:
            raise UserError(f"{token} is no token: they lie in 0..{size - 1}")


def _tensors(rows: Sequence[Sequence[int | None]]) -> dict[str, Tensor | None]:
    """The given tokens, where they are frozen, and the padding of shorter rows (None if there is none), all
    [B, L]."""
    longest = max(map(len, rows))
    behind = [longest - len(row) for row in rows]
    filled = [[*row, *([0] * extra)] for row, extra in zip(rows, behind, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    return {
        "given": torch.tensor([[0 if i is None else i for i in row] for row in filled]),
        "frozen": torch.tensor([[i is not None for i in row] for row in filled]),
        "padding": torch.arange(longest) >= lengths[:, None] if any(behind) else None,
    }


def join_trajectories(paths: Sequence[Trajectory]) -> Trajectory:
    """Trajectories of rows of one length as one; those that ended sooner stay as they were."""
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
