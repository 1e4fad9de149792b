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

from xdlm.errors import UserError
from xdlm.ops.rows import Impl, RowLoss, work_dtype
from xdlm.structs import HeadRows, RowLosses, RowStats


class BlockMath(Protocol):
    """The statistics of a block of rows, then its gradient; `part` is the block's slice of all rows."""

    #: How many logits a block may hold, without and with a gradient, but for blocks of so few rows; and up
    #: to how many, where these are all, are kept for the backward pass.
    elements: int
    gradient_elements: int
    least_rows: int
    kept_elements: int

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
    return RowStats(*_RowStats.apply(*rows, special, impl, torch.is_grad_enabled()))


def blocked_row_loss(rows: HeadRows, special: tuple[int, ...], impl: Impl, loss: RowLoss) -> Tensor:
    # Inside apply() gradients always seem to be switched off, so ask here.
    return _RowLoss.apply(*rows, special, impl, loss, torch.is_grad_enabled())


def blocks(n_rows: int, vocab_size: int, elements: int, least_rows: int = 1) -> Iterator[slice]:
    """Slices of all rows with at most `elements` logits each, or else of `least_rows`. Large ones are a
    multiple of the tiles that products work in, since a tile costs the same when it is half empty."""
    size = max(least_rows, elements // vocab_size)
    for multiple in (256, 64):
        if size >= multiple:
            size -= size % multiple
            break
    for start in range(0, n_rows, size):
        yield slice(start, min(start + size, n_rows))


def _blocks(rows: HeadRows, head: Head, math: BlockMath, *, for_gradient: bool) -> Iterator[slice]:
    elements = math.gradient_elements if for_gradient else math.elements
    return blocks(len(rows.hidden), len(head.weight), elements, math.least_rows)


class _HeadGradient:
    """Gradients of the head's inputs, added up block by block; the parameters' in float32."""

    def __init__(self, hidden: Tensor, head: Head, needed: tuple[bool, ...]) -> None:
        self.source, self.head = hidden, head
        self._kept: list[tuple[slice, LogitGradient]] = []
        dtype = work_dtype(hidden.dtype)
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = _Sum(head.weight, dtype) if needed[1] else None
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
            self.weight.add_product(d_logits.T, self.source[rows])
        if self.bias is not None and d_bias is not None:
            self.bias += d_bias

    def keep(self, rows: slice, block: LogitGradient) -> None:
        """Instead of `add`, for few rows: `taken` multiplies them by the upstream number and then adds
        them, which spares it the gradient of a whole weight."""
        self._kept.append((rows, block))

    def taken(self, factor: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """(hidden, weight, bias) gradients times an upstream number, in the inputs' dtypes. Once: it works
        in place."""
        if self._kept:
            for rows, block in self._kept:
                d_logits = _scaled(block.d_logits, factor)
                d_bias = None if block.d_bias is None else _scaled(block.d_bias, factor)
                self.add(rows, LogitGradient(d_logits, d_bias))
            factor = None
        weight = None if self.weight is None else self.weight.total
        parameters = (None if g is None else g[: self.head.size] for g in (weight, self.bias))
        found = (self.hidden, *parameters)
        return tuple(None if g is None else _scaled(g, factor).to(self.source.dtype) for g in found)


def _scaled(gradient: Tensor, factor: Tensor | None) -> Tensor:
    """In its own memory; the factor in float32, however coarse the gradient is: as a vector of one, since
    torch rounds a number without dimensions to the gradient's dtype on a GPU."""
    if factor is None:
        return gradient
    return gradient.mul_(factor.to(work_dtype(gradient.dtype)).reshape(1))


class _Sum:
    """Products [V, rows] @ [rows, d] added up; those of low precision in float32. The first one is what the
    others are added to: on a CPU, zeros for a whole weight take as long as a product of few rows."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._total: Tensor | None = None

    @property
    def total(self) -> Tensor:
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=self._dtype)
        return self._total

    def add_product(self, left: Tensor, right: Tensor) -> None:
        if left.dtype != self._dtype and left.is_cuda:
            torch.addmm(self.total, left, right, out_dtype=self._dtype, out=self.total)
            return
        left, right = left.to(self._dtype), right.to(self._dtype)
        if self._total is None:
            self._total = torch.mm(left, right)
        else:
            self._total.addmm_(left, right)


def _can_keep_logits(rows: HeadRows, head: Head, math: BlockMath) -> bool:
    """Whether there are few enough to be kept for the backward pass."""
    return len(rows.hidden) * len(head.weight) <= math.kept_elements


def _is_smaller_than_weight(rows: HeadRows, head: Head) -> bool:
    """The gradient by the logits, beside the one by the weight."""
    return len(rows.hidden) <= head.weight.shape[1]


def _prepared(rows: HeadRows, special: tuple[int, ...], impl: Impl) -> tuple[BlockMath, Head]:
    math = block_math(impl)
    return math, math.prepare(Head(rows.weight, rows.bias, special, len(rows.weight)))


class _RowStats(torch.autograd.Function):
    """Forward keeps four numbers per row; backward computes each block of logits once more, unless there
    are so few that they were kept too."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        rows, (special, impl, wanted) = _contiguous(HeadRows(*arguments[:6])), arguments[6:]
        math, head = _prepared(rows, special, impl)
        keep = wanted and any(ctx.needs_input_grad[:3]) and _can_keep_logits(rows, head, math)
        found = empty_found(rows, for_gradient=keep)
        states = []
        for part in _blocks(rows, head, math, for_gradient=False):
            state = math.stats(rows, part, head, found)
            if keep:
                states.append((part, state))
        ctx.save_for_backward(*rows)
        ctx.special, ctx.impl = special, impl
        ctx.kept = None
        if keep:  # copies, since a context that holds results is held by them
            own = found._replace(stats=RowStats(*(field.clone() for field in found.stats)))
            ctx.kept = own, states
        return found.stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows = HeadRows(*ctx.saved_tensors)
        math, head = _prepared(rows, ctx.special, ctx.impl)
        gradient = _HeadGradient(rows.hidden, head, ctx.needs_input_grad[:3])
        d = RowStats(*(grad.double().contiguous() for grad in upstream))
        if ctx.kept is not None:
            (found, states), ctx.kept = ctx.kept, None  # they are worked on in place
        else:
            found = empty_found(rows, for_gradient=True)
            parts = _blocks(rows, head, math, for_gradient=True)
            states = ((part, math.stats(rows, part, head, found)) for part in parts)
        for part, state in states:
            gradient.add(part, math.gradient(rows, part, state, found, d))
        return (*gradient.taken(), None, None, None, None, None, None)


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
        keep = _can_keep_logits(rows, head, math) and _is_smaller_than_weight(rows, head)

        def sweep(part: slice) -> None:
            """Of what it holds, nothing is left when the next block begins, unless it is kept."""
            state = math.stats(rows, part, head, found)
            if gradient is not None:
                loss(found.stats, part, out)
                take = gradient.keep if keep else gradient.add
                take(part, math.gradient(rows, part, state, found, out.d))

        for part in _blocks(rows, head, math, for_gradient=gradient is not None):
            sweep(part)
        if gradient is None:
            loss(found.stats, slice(0, len(rows.hidden)), out)
        ctx.gradient = gradient
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradient is None:
            raise UserError("row_loss keeps its gradient for one backward pass only")
        gradients = ctx.gradient.taken(upstream[0])
        ctx.gradient = None
        return (*gradients, None, None, None, None, None, None, None)


def _contiguous(rows: HeadRows) -> HeadRows:
    """Kernels expect the numbers of consecutive rows side by side, which views may not have."""
    return rows._replace(
        x=rows.x.contiguous(),
        z=rows.z.contiguous(),
        log_c=None if rows.log_c is None else rows.log_c.double().contiguous(),
    )
