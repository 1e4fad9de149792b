"""What a sampler gives, and where a text ends in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.models import Denoiser
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


def find_ends(
    z: Tensor, ready: Tensor, stop_ids: Sequence[int], lengths: Tensor | None = None
) -> Tensor:
    """[B]: the first position of `z` [B, L] with one of `stop_ids` where `ready` [B, L]; else the row's
    length, L unless given."""
    lengths = row_lengths(z, None) if lengths is None else lengths
    stops = torch.tensor(tuple(stop_ids), dtype=z.dtype, device=z.device)
    found = torch.isin(z, stops) & ready
    first = found.to(torch.uint8).argmax(1)
    return torch.where(found.any(1), first, lengths)


def row_lengths(z: Tensor, padding: Tensor | None) -> Tensor:
    """[B]: how many positions of each row of `z` [B, L] hold tokens."""
    if padding is None:
        return torch.full_like(z[:, 0], z.shape[1])
    return (~padding).sum(1)


def check_padding(denoiser: Denoiser, frozen: Tensor, padding: Tensor) -> None:
    """Raise unless a model can leave positions out, and these stand behind the tokens and are frozen: then
    a row has the places, and so the random numbers, that it has alone."""
    if not denoiser.takes_padding:
        raise UserError("this backbone takes no padding: give it rows of one length at a time")
    behind = padding[:, 1:] | ~padding[:, :-1]
    if padding.shape != frozen.shape or not bool(behind.all()) or bool((padding & ~frozen).any()):
        raise UserError("padding stands behind the tokens of a row, and frozen holds there")
