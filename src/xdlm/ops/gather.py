"""Rows that a mask picks, gathered without making a GPU wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PickedRows:
    """The places where a mask holds. On a GPU their number travels to the host while other work runs:
    make this first, then start the work that does not need it, then ask for `flat`."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask.flatten()
        self._flat: Tensor | None = None
        if mask.is_cuda:
            self._count = torch.empty((), dtype=torch.int64, pin_memory=True)
            self._count.copy_(self._mask.sum(), non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(mask.device))

    @property
    def flat(self) -> Tensor:
        """Indices into the flattened mask, in order."""
        if self._flat is None:
            if self._mask.is_cuda:
                self._done.synchronize()
                self._flat = _compact(self._mask)[: int(self._count)]
            else:
                self._flat = self._mask.nonzero()[:, 0]
        return self._flat


def _compact(mask: Tensor) -> Tensor:
    """The places where a flat mask is True come first, in order; what follows them is arbitrary."""
    place = torch.arange(len(mask), device=mask.device)
    target = torch.where(mask, mask.cumsum(0) - 1, len(mask))
    return place.new_zeros(len(mask) + 1).scatter_(0, target, place)


def take_rows(source: Tensor, rows: Tensor) -> Tensor:
    """`source[rows]` for distinct `rows`, whose gradient is then a plain copy."""
    return _TakeRows.apply(source, rows)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = source.shape
        return source.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return upstream[0].new_zeros(ctx.shape).index_copy_(0, rows, upstream[0]), None
