"""What a step of the reverse process is given, and what it gives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.ops.head import RowDraws
from xdlm.sampling.guidance import Guidance
from xdlm.sampling.seen import SeenRows
from xdlm.structs import Coefs


class Leg(NamedTuple):
    """One step of the time grid: from coefficients at t to those at s, the two times, and `gain`, by how
    much alpha grows: the share of positions that are drawn from the model."""

    at_t: Coefs
    at_s: Coefs
    t: float
    s: float
    gain: float
    last: bool


class Run(NamedTuple):
    """What stays the same from step to step; `n_free` is the fewest open positions in a sequence."""

    denoiser: Denoiser
    process: NoiseProcess
    head: RowDraws
    free: Tensor | None
    n_free: int
    label: Tensor | None
    guidance: Guidance
    padding: Tensor | None
    record: bool
    seen: SeenRows | None = None


class Stepped(NamedTuple):
    """The next state, which sequences went through the trunk, how many rows went through the head and, if
    the run is recorded, the probabilities of the tokens that the model wrote: [B, L], NaN elsewhere."""

    z: Tensor
    evaluated: Tensor
    head_rows: int | Tensor
    probs: Tensor | None


def time_grid(process: NoiseProcess, steps: int, like: Tensor) -> Iterator[Leg]:
    """`steps` equal legs from pure noise at t = 1 down to t_min, then the one to the data.

    All coefficients are computed at once on the CPU and moved to the device of `like` [B] together.
    """
    t_min = process.time_range[0]
    marks = [1 + (t_min - 1) * i / steps for i in range(steps + 1)] + [0.0]
    later = process.coefs(torch.tensor(marks[1:], dtype=torch.float64))
    alphas = [0.0, *later.alpha.tolist()]
    later = later.to(like.device)
    at_t = process.terminal(torch.zeros_like(like, dtype=torch.float64))
    for i, (t, s) in enumerate(pairwise(marks)):
        at_s = later.index(slice(i, i + 1)).expand(len(like))
        yield Leg(at_t, at_s, t, s, gain=alphas[i + 1] - alphas[i], last=i == steps)
        at_t = at_s
