"""Rows that a mask picks, gathered without making a GPU wait."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: On a GPU the number of rows is rounded up to a multiple of this: the library for matrix products
#: spends milliseconds on each size that it has not met before.
_MULTIPLE = 256


class PickedRows:
    """The places where a mask holds. On a GPU their number travels to the host while other work runs:
    make this first, then start the work that does not need it, then ask for `order`."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask.flatten()
        if mask.is_cuda:
            self._count = torch.empty((), dtype=torch.int64, pin_memory=True)
            self._count.copy_(self._mask.sum(), non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(mask.device))

    def order(self) -> tuple[Tensor, int]:
        """Indices into the flattened mask, all distinct, and how many of them are picked: those come
        first, in order. On a GPU some that are not picked may follow."""
        if not self._mask.is_cuda:
            rows = self._mask.nonzero()[:, 0]
            return rows, len(rows)
        self._done.synchronize()
        count = int(self._count)
        if count == len(self._mask):
            return torch.arange(count, device=self._mask.device), count
        return padded_order(self._mask, count, _MULTIPLE)


class TakenRows(NamedTuple):
    """Rows that were gathered: states, places among all positions, and what there is at those places, which
    is numbers to draw by, tokens, and bars as in `sampling.seen`."""

    hidden: Tensor
    at: Tensor
    uniform: Tensor
    z: Tensor
    bar: Tensor


def ordered_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Every index into a flat mask, those that it picks first, and how many those are, as a tensor: nobody
    waits."""
    return padded_order(mask, len(mask), 1)[0], mask.sum()


def padded_order(mask: Tensor, count: int, multiple: int) -> tuple[Tensor, int]:
    """The places where a flat mask is True in order, then some where it is not, a multiple in all."""
    place = torch.arange(len(mask), device=mask.device)
    if not len(mask):
        return place, count
    through = mask.cumsum(0)
    target = torch.where(mask, through - 1, through[-1] + place - through)
    order = torch.empty_like(place).scatter_(0, target, place)
    return order[: -(-count // multiple) * multiple], count


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
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return upstream[0].new_zeros(ctx.shape).index_copy_(0, rows, upstream[0]), None
