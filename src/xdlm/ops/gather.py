"""Gathering the rows that a mask picks, without making the host wait for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xdlm.ops.device import has_triton

#: On a GPU the number of rows is rounded up to a multiple of this: the library for matrix products
#: spends milliseconds on each size that it has not met before.
_MULTIPLE = 256


class PickedRows:
    """The positions where a mask holds. On a GPU their number is copied to the host while other work runs:
    make this first, then start work that does not need it, then ask for `order`."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask.flatten()
        if mask.is_cuda:
            self._order, self._count = ordered_rows(self._mask)
            self._on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
            self._on_host.copy_(self._count, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(mask.device))

    def order(self) -> tuple[Tensor, int]:
        """Indices into the flattened mask, all distinct, and how many of them are picked: those come
        first, in order. On a GPU some that are not picked may follow."""
        if not self._mask.is_cuda:
            rows = self._mask.nonzero()[:, 0]
            return rows, len(rows)
        self._done.synchronize()
        count = int(self._on_host)
        return padded(self._order, count, _MULTIPLE), count

    @property
    def count(self) -> Tensor:
        """How many are picked, as a number where the mask is."""
        return self._count if self._mask.is_cuda else self._mask.sum()


def ordered_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Every index into a flat mask, the picked ones first, both kinds in order; and how many are picked, as
    a tensor, so that the host need not wait."""
    if mask.is_cuda and has_triton() and len(mask):
        from xdlm.ops.fused_order import fused_order

        return fused_order(mask)
    return ordered_in_torch(mask)


def ordered_in_torch(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The kernels' slow twin."""
    through, place = mask.cumsum(0), torch.arange(len(mask), device=mask.device)
    count = mask.sum()
    target = torch.where(mask, through - 1, count + place - through)
    return torch.empty_like(place).scatter_(0, target, place), count


def padded(order: Tensor, count: int, multiple: int) -> Tensor:
    """The first `count` of all places, and as many more as make it a multiple, if there are so many."""
    return order[: -(-count // multiple) * multiple]


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
