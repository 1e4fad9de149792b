"""The head, a block of rows at a time: memory bounded, whatever the number of rows.

With p = softmax(logits), u_e = c p_e and q_e = u_e/(1 + u_e) (the sigmoid of log c + log p_e):

    S                 = sum_e log1p(u_e)
    d lse / d logit_j = p_j
    d S / d logit_j   = q_j - p_j sum_e q_e

What is done to a block of logits differs by device and is a `BlockMath`: `chunked.TorchBlock` in
plain torch, `fused.TritonBlock` in two kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xdlm.ops.rows import Impl, RowLoss, work_dtype
from xdlm.structs import HeadRows, RowLosses, RowStats


class BlockMath(Protocol):
    """The statistics of a block of rows, then its gradient; `part` is the block's slice of all rows."""

    #: How many logits a block may hold, without and with a gradient.
    elements: int
    gradient_elements: int

    def prepare(self, head: Head) -> Head: ...

    def stats(self, rows: HeadRows, part: slice, head: Head, out: Found) -> Tensor:
        """Writes the statistics to `out`; returns what `gradient` needs of the logits."""
        ...

    def gradient(
        self, rows: HeadRows, part: slice, state: Tensor, found: Found, d: RowStats
    ) -> LogitGradient:
        """The gradient by the logits, from what `stats` returned and wrote."""
        ...


class Head(NamedTuple):
    """The head's parameters, as given or prepared. Prepared ones may have more rows than `size`, the size
    of the vocabulary."""

    weight: Tensor
    bias: Tensor | None
    special: tuple[int, ...]
    size: int


class LogitGradient(NamedTuple):
    """By a block of logits [rows, V], in the dtype of the head's inputs; summed over rows for a bias."""

    d_logits: Tensor
    d_bias: Tensor | None


class Found(NamedTuple):
    """Statistics of all rows, and `spread` = sum_e q_e if a gradient will need it."""

    stats: RowStats
    spread: Tensor | None


def empty_found(rows: HeadRows, *, for_gradient: bool) -> Found:
    n_rows, device = len(rows.hidden), rows.hidden.device
    totals = torch.zeros(2, n_rows, dtype=work_dtype(rows.hidden.dtype), device=device)
    lse, logit_x, logit_z = torch.zeros(3, n_rows, dtype=torch.float64, device=device)
    return Found(RowStats(lse, logit_x, logit_z, totals[0]), totals[1] if for_gradient else None)


def block_math(impl: Impl) -> BlockMath:
    if impl == "fused":
        from xdlm.ops.fused import TritonBlock

        return TritonBlock()
    from xdlm.ops.chunked import TorchBlock

    return TorchBlock()


def blocked_row_stats(rows: HeadRows, special: tuple[int, ...], impl: Impl) -> RowStats:
    return RowStats(*_RowStats.apply(*rows, special, impl))


def blocked_row_loss(rows: HeadRows, special: tuple[int, ...], impl: Impl, loss: RowLoss) -> Tensor:
    # Inside apply() gradients always seem to be switched off, so ask here.
    return _RowLoss.apply(*rows, special, impl, loss, torch.is_grad_enabled())


def blocks(n_rows: int, vocab_size: int, elements: int) -> Iterator[slice]:
    """Slices of all rows with at most `elements` logits each. Large ones are a multiple of the tiles that
    products work in, since a tile costs the same when it is half empty."""
    size = max(1, elements // vocab_size)
    for multiple in (256, 64):
        if size >= multiple:
            size -= size % multiple
            break
    for start in range(0, n_rows, size):
        yield slice(start, min(start + size, n_rows))


def _blocks(rows: HeadRows, head: Head, math: BlockMath, *, for_gradient: bool) -> Iterator[slice]:
    elements = math.gradient_elements if for_gradient else math.elements
    return blocks(len(rows.hidden), len(head.weight), elements)


class _HeadGradient:
    """Gradients of the head's inputs, added up block by block; the parameters' in float32."""

    def __init__(self, hidden: Tensor, head: Head, needed: tuple[bool, ...]) -> None:
        self.source, self.head = hidden, head
        dtype = work_dtype(hidden.dtype)
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(head.weight, dtype=dtype) if needed[1] else None
        self.bias = (
            torch.zeros_like(head.bias, dtype=dtype)
            if needed[2] and head.bias is not None
            else None
        )

    def add(self, rows: slice, block: LogitGradient) -> None:
        d_logits, d_bias = block
        if self.hidden is not None:
            torch.mm(d_logits, self.head.weight, out=self.hidden[rows])
        if self.weight is not None:
            self.weight = add_product(self.weight, d_logits.T, self.source[rows])
        if self.bias is not None and d_bias is not None:
            self.bias += d_bias

    def scaled(self, factor: Tensor) -> tuple[Tensor | None, ...]:
        """(hidden, weight, bias) gradients times an upstream scalar, in the inputs' dtypes."""
        size, dtype = self.head.size, work_dtype(self.source.dtype)
        parameters = (None if g is None else g[:size] for g in (self.weight, self.bias))
        return tuple(
            None if grad is None else (grad * factor.to(dtype)).to(self.source.dtype)
            for grad in (self.hidden, *parameters)
        )


def add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`total + left @ right`, with products of low precision added up in float32."""
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    return total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _prepared(rows: HeadRows, special: tuple[int, ...], impl: Impl) -> tuple[BlockMath, Head]:
    math = block_math(impl)
    return math, math.prepare(Head(rows.weight, rows.bias, special, len(rows.weight)))


class _RowStats(torch.autograd.Function):
    """Forward keeps four numbers per row; backward computes each block of logits once more."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        rows, (special, impl) = _contiguous(HeadRows(*arguments[:6])), arguments[6:]
        math, head = _prepared(rows, special, impl)
        found = empty_found(rows, for_gradient=False)
        for part in _blocks(rows, head, math, for_gradient=False):
            math.stats(rows, part, head, found)
        ctx.save_for_backward(*rows)
        ctx.special, ctx.impl = special, impl
        return found.stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows = HeadRows(*ctx.saved_tensors)
        math, head = _prepared(rows, ctx.special, ctx.impl)
        gradient = _HeadGradient(rows.hidden, head, ctx.needs_input_grad[:3])
        found = empty_found(rows, for_gradient=True)
        d = RowStats(*(grad.double().contiguous() for grad in upstream))
        for part in _blocks(rows, head, math, for_gradient=True):
            state = math.stats(rows, part, head, found)
            gradient.add(part, math.gradient(rows, part, state, found, d))
        one = torch.ones((), device=rows.hidden.device)
        return (*gradient.scaled(one), None, None, None, None, None)


class _RowLoss(torch.autograd.Function):
    """Loss and gradient in one sweep; backward only multiplies by the upstream number."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        rows, (special, impl, loss, wanted) = _contiguous(HeadRows(*arguments[:6])), arguments[6:]
        math, head = _prepared(rows, special, impl)
        needed = ctx.needs_input_grad[:3]
        gradient = _HeadGradient(rows.hidden, head, needed) if wanted and any(needed) else None
        found = empty_found(rows, for_gradient=gradient is not None)
        losses, *d = torch.zeros(5, len(rows.hidden), dtype=torch.float64, device=rows.x.device)
        out = RowLosses(losses, RowStats(*d))
        for part in _blocks(rows, head, math, for_gradient=gradient is not None):
            state = math.stats(rows, part, head, found)
            if gradient is not None:
                loss(found.stats, part, out)
                gradient.add(part, math.gradient(rows, part, state, found, out.d))
        if gradient is None:
            loss(found.stats, slice(0, len(rows.hidden)), out)
        ctx.gradient = gradient
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradient is None:
            raise RuntimeError("row_loss keeps its gradient for one backward pass only")
        gradients = ctx.gradient.scaled(upstream[0])
        ctx.gradient = None
        return (*gradients, None, None, None, None, None, None, None)


def _contiguous(rows: HeadRows) -> HeadRows:
    """Kernels expect the numbers of consecutive rows side by side, which views may not have."""
    return rows._replace(
        x=rows.x.contiguous(),
        z=rows.z.contiguous(),
        log_c=None if rows.log_c is None else rows.log_c.double().contiguous(),
    )
