"""What a sampler gives, and where a text ends in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xdlm.sampling.trajectory import Trajectory


@dataclass(frozen=True)
class Sample:
    """The result of a run. `nfe` [B] counts the forward passes that each sequence went through: at
    most one a step (two under guidance), none where nothing of it needed the model. `ends` [B] is where
    each sequence met a token that ends a text, or its length if it met none."""

    tokens: Tensor
    nfe: Tensor
    head_rows: int
    trajectory: Trajectory | None
    ends: Tensor


def find_ends(z: Tensor, ready: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """[B]: the first position of `z` [B, L] with one of `stop_ids` where `ready` [B, L]; else L."""
    stops = torch.tensor(tuple(stop_ids), dtype=z.dtype, device=z.device)
    found = torch.isin(z, stops) & ready
    first = found.to(torch.uint8).argmax(1)
    return torch.where(found.any(1), first, z.shape[1])
