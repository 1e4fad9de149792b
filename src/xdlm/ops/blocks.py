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

from xdlm.ops.rows import Impl, RowLoss, work_dtype
from xdlm.structs import RowStats


class BlockMath(Protocol):
    """The statistics of a block of logits, then its gradient. Logits may be overwritten."""

    #: How many logits a block may hold.
    elements: int

    def prepare(self, head: Head) -> Head: ...

    def logits(self, hidden: Tensor, head: Head) -> Tensor: ...

    def stats(
        self,
        logits: Tensor,
        head: Head,
        x: Tensor,
        z: Tensor,
        log_c: Tensor | None,
        for_gradient: bool,
    ) -> Block: ...

    def gradient(self, block: Block, head: Head, d: RowStats, dtype: torch.dtype) -> Tensor: ...


class Head(NamedTuple):
    """The head's parameters, as given or prepared; prepared ones may be longer than the `size` of the
    vocabulary."""

    weight: Tensor
    bias: Tensor | None
    special: tuple[int, ...]
    size: int


class Block(NamedTuple):
    """Statistics of a block, and what its gradient needs: the inputs, the state that `stats` left of
    the logits, and `spread` = sum_e q_e."""

    stats: RowStats
    state: Tensor
    spread: Tensor | None
    x: Tensor
    z: Tensor
    log_c: Tensor | None


def block_math(impl: Impl) -> BlockMath:
    if impl == "fused":
        from xdlm.ops.fused import TritonBlock

        return TritonBlock()
    from xdlm.ops.chunked import TorchBlock

    return TorchBlock()


def blocked_row_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    z: Tensor,
    log_c: Tensor | None,
    special: tuple[int, ...],
    impl: Impl,
) -> RowStats:
    return RowStats(*_RowStats.apply(hidden, weight, bias, x, z, log_c, special, impl))


def blocked_row_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    z: Tensor,
    log_c: Tensor | None,
    special: tuple[int, ...],
    impl: Impl,
    loss: RowLoss,
) -> Tensor:
    # Inside apply() gradients always look switched off, so ask here.
    wanted = torch.is_grad_enabled()
    return _RowLoss.apply(hidden, weight, bias, x, z, log_c, special, impl, loss, wanted)


def _blocks(n_rows: int, vocab_size: int, elements: int) -> Iterator[slice]:
    size = max(1, elements // vocab_size)
    size -= size % 64 if size >= 64 else 0
    for start in range(0, n_rows, size):
        yield slice(start, min(start + size, n_rows))


def _part(log_c: Tensor | None, rows: slice) -> Tensor | None:
    return None if log_c is None else log_c[rows]


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

    def add(self, rows: slice, d_logits: Tensor) -> None:
        """`d_logits` [rows, V], in the dtype of the head's inputs."""
        if self.hidden is not None:
            torch.mm(d_logits, self.head.weight, out=self.hidden[rows])
        if self.weight is not None:
            self.weight = add_product(self.weight, d_logits.T, self.source[rows])
        if self.bias is not None:
            self.bias += d_logits.sum(0, dtype=self.bias.dtype)

    def scaled(self, factor: Tensor) -> tuple[Tensor | None, ...]:
        """(hidden, weight, bias) gradients times an upstream scalar, in the inputs' dtypes."""
        size = self.head.size
        parameters = (None if g is None else g[:size] for g in (self.weight, self.bias))
        return tuple(
            None if grad is None else (grad * factor.to(grad.dtype)).to(self.source.dtype)
            for grad in (self.hidden, *parameters)
        )


def add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`total + left @ right`, with products of low precision added up in float32."""
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=total.dtype)
    return total.addmm_(left.to(total.dtype), right.to(total.dtype))


class _RowStats(torch.autograd.Function):
    """Forward keeps four numbers per row; backward computes each block of logits once more."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x: Tensor,
        z: Tensor,
        log_c: Tensor | None,
        special: tuple[int, ...],
        impl: Impl,
    ) -> tuple[Tensor, ...]:
        math = block_math(impl)
        head = math.prepare(Head(weight, bias, special, len(weight)))
        n_rows = len(hidden)
        total = hidden.new_zeros(n_rows, dtype=work_dtype(hidden.dtype))
        lse, logit_x, logit_z = (hidden.new_zeros(n_rows, dtype=torch.float64) for _ in range(3))
        everything = RowStats(lse, logit_x, logit_z, total)
        for rows in _blocks(n_rows, len(weight), math.elements):
            logits = math.logits(hidden[rows], head)
            block = math.stats(logits, head, x[rows], z[rows], _part(log_c, rows), False)
            for whole, part in zip(everything, block.stats, strict=True):
                whole[rows] = part
        ctx.save_for_backward(hidden, weight, bias, x, z, log_c)
        ctx.special, ctx.impl = special, impl
        return everything

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, x, z, log_c = ctx.saved_tensors
        math = block_math(ctx.impl)
        head = math.prepare(Head(weight, bias, ctx.special, len(weight)))
        gradient = _HeadGradient(hidden, head, ctx.needs_input_grad[:3])
        for rows in _blocks(len(hidden), len(weight), math.elements):
            logits = math.logits(hidden[rows], head)
            block = math.stats(logits, head, x[rows], z[rows], _part(log_c, rows), True)
            d = RowStats(*(grad[rows] for grad in upstream))
            gradient.add(rows, math.gradient(block, head, d, hidden.dtype))
        one = torch.ones((), device=hidden.device)
        return (*gradient.scaled(one), None, None, None, None, None)


class _RowLoss(torch.autograd.Function):
    """Loss and gradient in one sweep; backward only multiplies by the upstream number."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x: Tensor,
        z: Tensor,
        log_c: Tensor | None,
        special: tuple[int, ...],
        impl: Impl,
        loss: RowLoss,
        wanted: bool,
    ) -> Tensor:
        math = block_math(impl)
        head = math.prepare(Head(weight, bias, special, len(weight)))
        needed = ctx.needs_input_grad[:3]
        ctx.gradient = _HeadGradient(hidden, head, needed) if wanted and any(needed) else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for rows in _blocks(len(hidden), len(weight), math.elements):
            logits = math.logits(hidden[rows], head)
            block = math.stats(
                logits, head, x[rows], z[rows], _part(log_c, rows), ctx.gradient is not None
            )
            losses, d = loss(block.stats, rows)
            total += losses.sum(dtype=torch.float64)
            if ctx.gradient is not None:
                ctx.gradient.add(rows, math.gradient(block, head, d, hidden.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradient.scaled(upstream[0])
        ctx.gradient = None
        return (*gradients, None, None, None, None, None, None, None)
