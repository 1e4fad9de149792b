"""The statistics of rows whose prediction is a logistic law cut into levels, in one Triton kernel each way,
and draws under guidance in another.

A row is two numbers, a place m and a raw width, from which its levels follow (see `models.logistic`): with
i = 1/s and edges a < b of a level's bin, u = (a - m) i, v = (b - m) i, w the width of a bin,

    log p     = log sigmoid(v) + log sigmoid(-u) + log(1 - exp(-w i))
    d/dm      = i (sigmoid(u) - sigmoid(-v))
    d/d log i = v sigmoid(-v) - u sigmoid(u) + w i/(exp(w i) - 1)

where the first level has no u, the last no v, and neither the term of w. Levels are made as needed,
256 of them for each of some rows, and never written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from xdlm.ops.device import given_or
from xdlm.ops.fused import log1p
from xdlm.structs import RowStats

#: Levels that a program holds at a time.
_ELEMENTS = 1024


class Law(NamedTuple):
    """How a raw width becomes a scale, exp(raw - shift) with raw between two bounds, and how many levels
    there are."""

    levels: int
    shift: float
    lowest: float
    highest: float


def logistic_row_stats(
    hidden: Tensor, x: Tensor, z: Tensor, log_c: Tensor | None, law: Law
) -> RowStats:
    """As `row_stats` for places and raw widths `hidden` [R, 2] in float32; what is no level, a mask, has
    no mass. All levels together have mass 1, so that `lse` is 0."""
    logit_x, logit_z, total = _Stats.apply(hidden, x, z, log_c, law)
    lse = torch.zeros_like(logit_x, dtype=torch.float64)
    return RowStats(lse, logit_x.double(), logit_z.double(), total)


def guided_logistic_draws(
    hidden: Tensor, unlabelled: Tensor, scale: float, uniform: Tensor, z: Tensor, law: Law
) -> tuple[Tensor, Tensor]:
    """As `draw_and_weigh` for the law `scale log p_with + (1 - scale) log p_without` of two logistic laws,
    [R, 2] in float32 each. Where `uniform` is negative the level may be any."""
    hidden, unlabelled, uniform, z = (
        given.contiguous() for given in (hidden, unlabelled, uniform, z)
    )
    drawn, p_z = torch.empty_like(z), torch.empty_like(z, dtype=torch.float64)
    if len(z):
        _guided_kernel[_grid(hidden, law)](
            hidden, unlabelled, uniform, z, drawn, p_z, len(hidden), float(scale), **_shape(law),
            num_warps=4,
        )  # fmt: skip
    return drawn, p_z


class _Stats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, x: Tensor, z: Tensor, log_c: Tensor | None, law: Law
    ) -> tuple[Tensor, ...]:
        hidden, x, z = (given.contiguous() for given in (hidden, x, z))
        log_c = None if log_c is None else log_c.contiguous()
        out = hidden.new_empty(3, len(hidden))
        _stats_kernel[_grid(hidden, law)](
            hidden, x, z, given_or(log_c, x), *out.unbind(), len(hidden), **_shape(law),
            HAS_SUM=log_c is not None, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(hidden, x, z, log_c)
        ctx.law = law
        return out.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, x, z, log_c = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        _gradient_kernel[_grid(hidden, ctx.law)](
            hidden, x, z, given_or(log_c, x), *(d.contiguous() for d in upstream), d_hidden,
            len(hidden), **_shape(ctx.law), HAS_SUM=log_c is not None, num_warps=4,
        )  # fmt: skip
        return d_hidden, None, None, None, None


def _shape(law: Law) -> dict[str, Any]:
    block = triton.next_power_of_2(law.levels)
    return {
        "LEVELS": law.levels, "SHIFT": law.shift, "LOWEST": law.lowest, "HIGHEST": law.highest,
        "BLOCK": block, "ROWS": max(1, _ELEMENTS // block),
    }  # fmt: skip


def _grid(hidden: Tensor, law: Law) -> tuple[int]:
    return (triton.cdiv(len(hidden), _shape(law)["ROWS"]),)


@triton.jit
def _log_sigmoid(v):
    return tl.minimum(v, 0.0) - log1p(tl.exp(-tl.abs(v)))


@triton.jit
def _less_than_one(t):
    """1 - exp(-t) for t > 0, by its series where the difference would lose digits."""
    series = t * (1 - t * (0.5 - t * (0.16666667 - t * (0.041666668 - t * 0.008333334))))
    return tl.where(t < 0.1, series, 1 - tl.exp(-t))


@triton.jit
def _level(level, m, i, LEVELS: tl.constexpr):
    """Of a level under a law with place m and inverse scale i: its log-probability, and the derivatives of
    that by m and by log i."""
    half: tl.constexpr = 1 / (LEVELS - 1)
    middle = level.to(tl.float32) * (2 * half) - 1
    u, v = (middle - half - m) * i, (middle + half - m) * i
    first, last = level == 0, level == LEVELS - 1
    t = (2 * half) * i
    inside = _less_than_one(t)
    log_p = tl.where(last, 0.0, _log_sigmoid(v)) + tl.where(first, 0.0, _log_sigmoid(-u))
    log_p += tl.where(first | last, 0.0, tl.log(inside))
    below = tl.where(first, 0.0, tl.sigmoid(u))
    above = tl.where(last, 0.0, tl.sigmoid(-v))
    # t/(exp(t) - 1) = t exp(-t)/(1 - exp(-t))
    by_width = tl.where(first | last, 0.0, t * tl.exp(-t) / inside)
    return log_p, i * (below - above), v * above - u * below + by_width


@triton.jit
def _law_of(hidden_ptr, row, there, SHIFT: tl.constexpr, LOWEST: tl.constexpr,
            HIGHEST: tl.constexpr):  # fmt: skip
    """Place, inverse scale, and whether the width is one that moves with the raw one."""
    m = tl.load(hidden_ptr + 2 * row, mask=there, other=0.0)
    raw = tl.load(hidden_ptr + 2 * row + 1, mask=there, other=0.0)
    moves = (raw >= LOWEST) & (raw <= HIGHEST)
    return m, tl.exp(SHIFT - tl.minimum(tl.maximum(raw, LOWEST), HIGHEST)), moves


@triton.jit
def _stats_kernel(
    hidden_ptr, x_ptr, z_ptr, log_c_ptr, logit_x_ptr, logit_z_ptr, total_ptr, rows,
    LEVELS: tl.constexpr, SHIFT: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_SUM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < rows
    m, i, _ = _law_of(hidden_ptr, row, there, SHIFT, LOWEST, HIGHEST)
    x = tl.load(x_ptr + row, mask=there, other=0)
    z = tl.load(z_ptr + row, mask=there, other=0)
    log_p_x, _, _ = _level(x, m, i, LEVELS)
    log_p_z, _, _ = _level(z, m, i, LEVELS)
    tl.store(logit_x_ptr + row, log_p_x, mask=there)
    tl.store(logit_z_ptr + row, tl.where(z < LEVELS, log_p_z, -float("inf")), mask=there)
    total = tl.zeros((ROWS, 1), tl.float32)
    if HAS_SUM:
        c = tl.minimum(tl.exp(tl.load(log_c_ptr + row, mask=there, other=0.0).to(tl.float32)), 1e18)
        level = tl.arange(0, BLOCK)[None]
        log_p, _, _ = _level(level, m, i, LEVELS)
        terms = tl.where(level < LEVELS, log1p(c * tl.exp(log_p)), 0.0)
        total = tl.sum(terms, 1)[:, None]
    tl.store(total_ptr + row, total, mask=there)


@triton.jit
def _gradient_kernel(
    hidden_ptr, x_ptr, z_ptr, log_c_ptr, d_x_ptr, d_z_ptr, d_total_ptr, d_hidden_ptr, rows,
    LEVELS: tl.constexpr, SHIFT: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_SUM: tl.constexpr,
):  # fmt: skip
    """S = sum log1p(c p) has the derivative sum c p/(1 + c p) d log p."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < rows
    m, i, moves = _law_of(hidden_ptr, row, there, SHIFT, LOWEST, HIGHEST)
    x = tl.load(x_ptr + row, mask=there, other=0)
    z = tl.load(z_ptr + row, mask=there, other=0)
    d_x = tl.load(d_x_ptr + row, mask=there, other=0.0)
    d_z = tl.where(z < LEVELS, tl.load(d_z_ptr + row, mask=there, other=0.0), 0.0)
    _, x_by_m, x_by_i = _level(x, m, i, LEVELS)
    _, z_by_m, z_by_i = _level(z, m, i, LEVELS)
    by_m = tl.where(d_x == 0, 0.0, d_x * x_by_m) + tl.where(d_z == 0, 0.0, d_z * z_by_m)
    by_i = tl.where(d_x == 0, 0.0, d_x * x_by_i) + tl.where(d_z == 0, 0.0, d_z * z_by_i)
    if HAS_SUM:
        c = tl.minimum(tl.exp(tl.load(log_c_ptr + row, mask=there, other=0.0).to(tl.float32)), 1e18)
        level = tl.arange(0, BLOCK)[None]
        log_p, l_by_m, l_by_i = _level(level, m, i, LEVELS)
        mass = c * tl.exp(log_p)
        share = tl.where(level < LEVELS, mass / (1 + mass), 0.0)
        d_total = tl.load(d_total_ptr + row, mask=there, other=0.0)
        by_m += d_total * tl.sum(share * l_by_m, 1)[:, None]
        by_i += d_total * tl.sum(share * l_by_i, 1)[:, None]
    tl.store(d_hidden_ptr + 2 * row, by_m, mask=there)
    tl.store(d_hidden_ptr + 2 * row + 1, tl.where(moves, -by_i, 0.0), mask=there)


@triton.jit
def _guided(level, m, i, other_m, other_i, scale, LEVELS: tl.constexpr):
    with_it, _, _ = _level(level, m, i, LEVELS)
    without, _, _ = _level(level, other_m, other_i, LEVELS)
    return without + scale * (with_it - without)


@triton.jit
def _guided_kernel(
    hidden_ptr, unlabelled_ptr, uniform_ptr, z_ptr, drawn_ptr, p_z_ptr, rows, scale,
    LEVELS: tl.constexpr, SHIFT: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The distribution function in float64, inverted: as many levels lie below as it does not exceed the
    random number."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    there = row < rows
    m, i, _ = _law_of(hidden_ptr, row, there, SHIFT, LOWEST, HIGHEST)
    other_m, other_i, _ = _law_of(unlabelled_ptr, row, there, SHIFT, LOWEST, HIGHEST)
    level = tl.arange(0, BLOCK)[None]
    logit = _guided(level, m, i, other_m, other_i, scale, LEVELS)
    logit = tl.where(level < LEVELS, logit, -float("inf"))
    top = tl.max(logit, 1)[:, None]
    through = tl.cumsum(tl.exp(logit - top).to(tl.float64), 1)
    total = tl.max(through, 1)[:, None]
    share = tl.load(uniform_ptr + row, mask=there, other=0.0)
    # A product that rounding lifts to the total would lie above all levels.
    target = tl.minimum(share, 1 - 2.220446049250313e-16) * total
    below = tl.sum(((through <= target) & (level < LEVELS)).to(tl.int32), 1)[:, None]
    drawn = tl.minimum(below, LEVELS - 1).to(tl.int64)
    z = tl.load(z_ptr + row, mask=there, other=0)
    at_z = _guided(z, m, i, other_m, other_i, scale, LEVELS)
    p_z = tl.exp(at_z - top).to(tl.float64) / total
    tl.store(drawn_ptr + row, drawn, mask=there)
    tl.store(p_z_ptr + row, tl.where(z < LEVELS, p_z, 0.0), mask=there)
