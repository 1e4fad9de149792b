"""Diffusion times, spread evenly over the global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.ops import Stream, uniform


def stratified_times(
    seed: int,
    step: int,
    index: Tensor,
    batch: int,
    *,
    time_range: tuple[float, float] = (0.0, 1.0),
) -> Tensor:
    """Times for the members `index` of a global batch of size `batch`: one in each of `batch` equal
    strata, all moved by one common random shift, so each is uniform on `time_range`.

    A pure function of its arguments: it does not matter how the batch is split over processes.
    """
    zero = torch.zeros(1, dtype=torch.int64, device=index.device)
    shift = uniform(seed, Stream.TIME, zero, zero, step)
    low, high = time_range
    return low + (high - low) * torch.remainder(index.double() / batch + shift, 1.0)
