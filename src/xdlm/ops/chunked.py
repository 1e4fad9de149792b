"""`row_stats` a block of rows at a time: plain torch, memory independent of the number of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from xdlm.ops.rows import SOFTPLUS_THRESHOLD, forbid, work_dtype
from xdlm.structs import RowStats

#: Floats of logits held at a time: 16 M of them, 64 MB in float32.
_CHUNK_ELEMENTS = 1 << 24


def chunked_row_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    z: Tensor,
    log_c: Tensor | None,
    special: tuple[int, ...],
) -> RowStats:
    return RowStats(*_ChunkedRowStats.apply(hidden, weight, bias, x, z, log_c, special))


def _chunks(n_rows: int, vocab_size: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocab_size)
    return [slice(start, min(start + size, n_rows)) for start in range(0, n_rows, size)]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, special: tuple[int, ...]
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return forbid(logits.to(work_dtype(logits.dtype)), special)


class _ChunkedRowStats(torch.autograd.Function):
    """Forward keeps four numbers per row; backward computes each block of logits once more.

    With p = softmax(logits) and g_e = c/(1 + c p_e):

        d lse / d logit_j = p_j
        d S / d logit_j   = p_j (g_j - sum_e p_e g_e)

    In terms of `sigmoid_e = c p_e/(1 + c p_e) = p_e g_e` the last line is
    `sigmoid_j - p_j sum_e sigmoid_e`.
    """

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
    ) -> tuple[Tensor, ...]:
        n_rows, vocab_size = hidden.shape[0], weight.shape[0]
        total = hidden.new_zeros(n_rows, dtype=work_dtype(hidden.dtype))
        lse, logit_x, logit_z = (hidden.new_zeros(n_rows, dtype=torch.float64) for _ in range(3))
        for rows in _chunks(n_rows, vocab_size):
            logits = _logits(hidden[rows], weight, bias, special)
            logit_x[rows] = logits.gather(1, x[rows, None])[:, 0].double()
            logit_z[rows] = logits.gather(1, z[rows, None])[:, 0].double()
            top = logits.amax(-1, keepdim=True)
            logits -= top
            log_sum = logits.logsumexp(-1, keepdim=True)
            lse[rows] = (top.double() + log_sum.double())[:, 0]
            if log_c is not None:
                logits += log_c[rows, None].to(logits.dtype) - log_sum
                total[rows] = F.softplus(logits, threshold=SOFTPLUS_THRESHOLD).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, x, z, log_c, lse)
        ctx.special = special
        return lse, logit_x, logit_z, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, x, z, log_c, lse = ctx.saved_tensors
        dtype = work_dtype(hidden.dtype)
        d_lse, d_x, d_z, d_total = (grad.to(dtype) for grad in grads)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros_like(hidden) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if need_bias else None
        for rows in _chunks(hidden.shape[0], weight.shape[0]):
            # A special token's logit is the constant -inf: nothing flows back into it.
            keep = ~_is_special(z[rows], ctx.special)
            logits = _logits(hidden[rows], weight, bias, ctx.special)
            logits -= lse[rows, None].to(dtype)
            probs = logits.exp()
            on_probs = d_lse[rows, None]
            if log_c is None:
                d_logits = probs * on_probs
            else:
                sigmoid = torch.sigmoid(logits + log_c[rows, None].to(dtype))
                on_sigmoid = d_total[rows, None]
                on_probs = on_probs - on_sigmoid * sigmoid.sum(-1, keepdim=True)
                d_logits = torch.addcmul(sigmoid.mul_(on_sigmoid), probs, on_probs)
            d_logits.scatter_add_(1, x[rows, None], d_x[rows, None])
            d_logits.scatter_add_(1, z[rows, None], (d_z[rows] * keep)[:, None])
            operand = d_logits.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = (operand @ weight).to(hidden.dtype)
            if d_weight is not None:
                d_weight += operand.T @ hidden[rows].to(weight.dtype)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None, None, None, None,
        )  # fmt: skip


def _is_special(z: Tensor, special: tuple[int, ...]) -> Tensor:
    result = torch.zeros_like(z, dtype=torch.bool)
    for token_id in special:
        result |= z == token_id
    return result
