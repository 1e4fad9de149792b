"""Rows of zeros behind a head's weight, up to a round number.

A product whose rows of logits are aligned runs three times as fast on a GPU. Where the memory of the
weight itself has room for them, nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_MULTIPLE = 128


@torch.no_grad()
def make_room(weight: Tensor) -> None:
    """Move a parameter [V, d] to memory with rows of zeros behind it. If it is given other memory later,
    the room is lost and nothing else changes. A sharded parameter has no memory of its own, and stays."""
    if type(weight.data) is Tensor and _room(weight) is None:
        buffer = weight.new_zeros(len(weight) + -len(weight) % _MULTIPLE, *weight.shape[1:])
        buffer[: len(weight)] = weight
        weight.data = buffer[: len(weight)]
        weight.room = buffer  # type: ignore[attr-defined]


def padded_rows(weight: Tensor) -> Tensor:
    """`weight` [V, d] with rows of zeros up to a multiple of 128; a copy only if it has no room."""
    padding = -len(weight) % _MULTIPLE
    if not padding:
        return weight
    room = _room(weight)
    return F.pad(weight.detach(), (0, 0, 0, padding)) if room is None else room


def _room(weight: Tensor) -> Tensor | None:
    room: Tensor | None = getattr(weight, "room", None)
    if room is None or len(room) != len(weight) + -len(weight) % _MULTIPLE:
        return None
    return room if (room.data_ptr(), room.dtype) == (weight.data_ptr(), weight.dtype) else None
