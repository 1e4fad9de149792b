"""Statistics of a block of logits, and their gradient, in Triton kernels.

Logits go to a bounded workspace in float32, and with them what each tile of the vocabulary adds up to
(`fused_product`). One kernel puts those sums together, reads a row of logits
where it needs S, and writes the statistics; another reads it once more and writes the gradient. Both are
`BlockMath`, with `chunked.TorchBlock` as their slow twin.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from xdlm.ops.blocks import Found, Head, LogitGradient
from xdlm.ops.device import given_or
from xdlm.ops.fused_product import Sums, can_multiply, product_with_sums
from xdlm.ops.fused_sums import finish_logits
from xdlm.ops.padding import padded_rows
from xdlm.ops.rows import work_dtype
from xdlm.structs import HeadRows, RowStats

#: A reader needs many programs on a multiprocessor, to have as many loads on their way. For statistics each
#: goes through a row, four blocks of tokens at a time; for gradients through a block of tokens, row by row.
_STATS_BLOCK, _STATS_WARPS = 512, 4
_GRADIENT_BLOCK, _GRADIENT_ROWS, _GRADIENT_WARPS = 2048, 32, 4


class TritonBlock:
    """`BlockMath` on a GPU. 208 MB of float32 logits, whatever the number of rows; 928 MB, and half of that
    for their gradient, where there is one, since each block then reads and writes the gradient of the whole
    weight. At 50,258 tokens these are blocks of 1,024 and 4,608 rows, whose tiles come out as 11.9 and 53.7
    to each of an H200's 132 multiprocessors: nearly none of them waits for the last. From 203,125 tokens on
    there are more than 208 MB, for two whole tiles of rows: each block reads the whole weight."""

    elements = 52_000_000
    gradient_elements = 232_000_000
    least_rows = 256
    kept_elements = 0

    def __init__(self) -> None:
        self._workspace: Tensor | None = None

    def prepare(self, head: Head) -> Head:
        """Rows of zeros up to a multiple of 128, and one bias in units of log 2 that is -inf beyond the
        vocabulary and at special tokens, so that kernels need no other test of what counts."""
        weight = padded_rows(head.weight)
        bias = weight.new_full((len(weight),), -torch.inf, dtype=torch.float32)
        if head.bias is None:
            bias[: head.size].zero_()
        else:
            torch.mul(head.bias.detach().float(), math.log2(math.e), out=bias[: head.size])
        for token in head.special:
            bias[token : token + 1].fill_(-torch.inf)  # unlike an assignment, this does not wait
        return head._replace(weight=weight, bias=bias)

    def summed_logits(self, hidden: Tensor, head: Head) -> tuple[Tensor, Sums]:
        """[rows, padded V] in units of log 2 (so that e^logit = 2^this), -inf where there is no ordinary
        token, and what their tiles add up to. Holds until the next call, which uses the same memory."""
        out = self._room(hidden, head)
        if can_multiply(hidden, head.weight):
            return out, product_with_sums(hidden, head, out)
        if hidden.dtype == out.dtype:
            torch.mm(hidden, head.weight.T, out=out)
        else:
            torch.mm(hidden, head.weight.T, out_dtype=out.dtype, out=out)
        return out, finish_logits(out, head)

    def _room(self, hidden: Tensor, head: Head) -> Tensor:
        rows, dtype = len(hidden), work_dtype(hidden.dtype)
        if self._workspace is None or len(self._workspace) < rows:
            self._workspace = None  # so that the old one is gone before there is a new one
            self._workspace = hidden.new_empty(rows, len(head.weight), dtype=dtype)
        return self._workspace[:rows]

    def stats(self, rows: HeadRows, part: slice, head: Head, out: Found) -> Tensor:
        logits, sums = self.summed_logits(rows.hidden[part], head)
        tiles = sums.top.shape[1]
        _stats_kernel[(len(logits),)](
            logits, rows.x, rows.z, given_or(rows.log_c, rows.x), *sums, *out.stats,
            given_or(out.spread, logits), part.start, logits.stride(0), tiles, width=logits.shape[1],
            TILES=triton.next_power_of_2(tiles), HAS_SUM=rows.log_c is not None,
            NEED_SPREAD=out.spread is not None, BLOCK=_block(logits.shape[1] // 4, _STATS_BLOCK),
            num_warps=_STATS_WARPS,
        )  # fmt: skip
        return logits

    def gradient(
        self, rows: HeadRows, part: slice, state: Tensor, found: Found, d: RowStats
    ) -> LogitGradient:
        (n_rows, width), for_bias = state.shape, rows.bias is not None
        d_logits = torch.empty_like(state, dtype=rows.hidden.dtype)
        block = _block(width, _GRADIENT_BLOCK)
        down, across = triton.cdiv(n_rows, _GRADIENT_ROWS), triton.cdiv(width, block)
        sums = state.new_empty(down if for_bias else 0, width)
        _gradient_kernel[(down * across,)](
            state, d_logits, sums, rows.x, rows.z, given_or(rows.log_c, rows.x), found.stats.lse,
            found.spread, *d, part.start, n_rows, state.stride(0), width=width,
            HAS_SUM=rows.log_c is not None, FOR_BIAS=for_bias, ROWS=_GRADIENT_ROWS,
            BLOCK=block, num_warps=_GRADIENT_WARPS,
        )  # fmt: skip
        return LogitGradient(d_logits, sums.sum(0) if for_bias else None)


def _block(width: int, most: int) -> int:
    """Tokens that a program takes at a time: no more than there are."""
    return min(most, max(32, triton.next_power_of_2(width)))


@triton.jit
def _load_c(log_c_ptr):
    """c = alpha/b, at most 1e18, so that the product of two (1 + c p) is a float32: noise of less than
    1e-18 counts for that much."""
    return tl.minimum(tl.exp(tl.load(log_c_ptr).to(tl.float32)), 1e18)


@triton.jit
def _load_logits(row_ptr, token, width: tl.constexpr):
    return tl.load(row_ptr + token, mask=token < width, other=-float("inf"))


@triton.jit
def log1p(v):
    """log(1 + v) for v >= 0, to float32's precision (relative error 1.1e-7).

    1 + v = 2^n (1 + r) with r in [-1/4, 1/2]; r comes from v itself, so that small v lose nothing. Then
    log(1 + r) = r + r^2 q(r), with q a least-squares fit of degree 7.
    """
    n = ((1 + v).to(tl.int32, bitcast=True) - 0x3F400000) & -0x800000
    inverse = (0x3F800000 - n).to(tl.float32, bitcast=True)
    r = tl.fma(v, inverse, inverse - 1)
    q = tl.fma(r, 0.04742371290922165, -0.11351145803928375)
    q = tl.fma(q, r, 0.1482638418674469)
    q = tl.fma(q, r, -0.16874758899211884)
    q = tl.fma(q, r, 0.19994744658470154)
    q = tl.fma(q, r, -0.24992650747299194)
    q = tl.fma(q, r, 0.33333173394203186)
    q = tl.fma(q, r, -0.5000006556510925)
    return tl.fma(n.to(tl.float32), 8.262958294867817e-08, tl.fma(q, r * r, r))  # n holds 2^23 n


@triton.jit
def total_of(top_ptr, mass_ptr, row, tiles, TILES: tl.constexpr):
    """From a row's sums: the highest logit, and the mass of all tokens relative to it."""
    tile = tl.arange(0, TILES)
    top = tl.load(top_ptr + row * tiles + tile, mask=tile < tiles, other=-3.0e38)
    mass = tl.load(mass_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    highest = tl.max(top, 0)
    return highest, tl.sum(mass * tl.exp2(top - highest), 0)


@triton.jit
def _four_blocks(row_ptr, token, width: tl.constexpr, BLOCK: tl.constexpr):
    """Logits at these tokens, and one, two and three blocks behind them; nothing before the first token."""
    begun = token >= 0
    return (
        tl.load(row_ptr + token, mask=begun & (token < width), other=-float("inf")),
        tl.load(row_ptr + token + BLOCK, mask=begun & (token + BLOCK < width), other=-float("inf")),
        tl.load(row_ptr + token + 2 * BLOCK, mask=begun & (token + 2 * BLOCK < width), other=-float("inf")),
        tl.load(row_ptr + token + 3 * BLOCK, mask=begun & (token + 3 * BLOCK < width), other=-float("inf")),
    )  # fmt: skip


@triton.jit
def _pair(one, other, highest, c):
    """With u, v = c p of two tokens: `both = (1 + u)(1 + v) - 1`, so that one logarithm does for two, and
    `both + u v`, since u/(1 + u) + v/(1 + v) = (both + u v)/(1 + both)."""
    u, v = c * tl.exp2(one - highest), c * tl.exp2(other - highest)
    product = u * v
    both = u + v + product
    return both, both + product


@triton.jit(do_not_specialize=["first"])
def _stats_kernel(
    logits_ptr, x_ptr, z_ptr, log_c_ptr, top_ptr, mass_ptr,
    lse_ptr, logit_x_ptr, logit_z_ptr, total_ptr, spread_ptr,
    first, stride, tiles, width: tl.constexpr, TILES: tl.constexpr, HAS_SUM: tl.constexpr,
    NEED_SPREAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """lse, logit_x, logit_z, S = sum log1p(u) and sum u/(1 + u), with u = c p, of one row: row
    `first + i` of all is row i of the block."""
    here = tl.program_id(0).to(tl.int64)
    row_ptr, row = logits_ptr + here * stride, first + here
    STEP: tl.constexpr = 4 * BLOCK
    if HAS_SUM:
        # Backwards, since what was written last is still in the cache; and each step's logits are loaded
        # during the one before, the first during all that must be known for it.
        lanes = tl.arange(0, BLOCK)
        last = (width - 1) // STEP * STEP
        one, two, three, four = _four_blocks(row_ptr, last + lanes, width, BLOCK)
    x, z = tl.load(x_ptr + row), tl.load(z_ptr + row)
    highest, mass = total_of(top_ptr, mass_ptr, here, tiles, TILES)
    at_x, at_z = _load_logits(row_ptr, x, width), _load_logits(row_ptr, z, width)
    if HAS_SUM:
        total = tl.zeros((BLOCK,), tl.float32)
        spread = tl.zeros((BLOCK,), tl.float32)
        c = _load_c(log_c_ptr + row)
        # The product of four (1 + u) is at most (1 + c/4)^4, since probabilities add up to 1.
        in_range = c < 1e10
        c /= mass
        for offset in range(0, width, STEP):
            token = last - offset - STEP + lanes
            next_one, next_two, next_three, next_four = _four_blocks(row_ptr, token, width, BLOCK)
            a, more_a = _pair(one, two, highest, c)
            b, more_b = _pair(three, four, highest, c)
            if in_range:
                both = a + b + a * b
                total += log1p(both)
                if NEED_SPREAD:
                    spread += (more_a * (1 + b) + more_b * (1 + a)) / (1 + both)
            else:
                total += log1p(a) + log1p(b)
                if NEED_SPREAD:
                    spread += more_a / (1 + a) + more_b / (1 + b)
            one, two, three, four = next_one, next_two, next_three, next_four
        tl.store(total_ptr + row, tl.sum(total, 0))
        if NEED_SPREAD:
            tl.store(spread_ptr + row, tl.sum(spread, 0))
    ln2: tl.constexpr = 0.6931471805599453
    tl.store(lse_ptr + row, highest.to(tl.float64) * ln2 + tl.log(mass.to(tl.float64)))
    tl.store(logit_x_ptr + row, at_x.to(tl.float64) * ln2)
    tl.store(logit_z_ptr + row, at_z.to(tl.float64) * ln2)


@triton.jit(do_not_specialize=["first", "rows"])
def _gradient_kernel(
    logits_ptr, d_logits_ptr, sums_ptr, x_ptr, z_ptr, log_c_ptr,
    lse_ptr, spread_ptr, d_lse_ptr, d_x_ptr, d_z_ptr, d_total_ptr,
    first, rows, stride, width: tl.constexpr, HAS_SUM: tl.constexpr, FOR_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`p (d_lse - d_S spread) + d_S u/(1 + u)`, plus d_x at x and d_z at z, for a block of tokens of some
    rows; and the sum over these rows."""
    ACROSS: tl.constexpr = (width + BLOCK - 1) // BLOCK
    start, tile = tl.program_id(0) % ACROSS * BLOCK, tl.program_id(0) // ACROSS
    HALF: tl.constexpr = BLOCK // 2
    token = start + tl.arange(0, HALF)
    sum_a = tl.zeros((HALF,), tl.float32)
    sum_b = tl.zeros((HALF,), tl.float32)
    for here in range(tile * ROWS, tl.minimum(tile * ROWS + ROWS, rows)):
        row, place = first + here, tl.cast(here, tl.int64) * stride
        x, z = tl.load(x_ptr + row).to(tl.int32), tl.load(z_ptr + row).to(tl.int32)
        on_probs = tl.load(d_lse_ptr + row).to(tl.float32)
        if HAS_SUM:
            d_total = tl.load(d_total_ptr + row).to(tl.float32)
            on_probs -= d_total * tl.load(spread_ptr + row)
            c = _load_c(log_c_ptr + row)
        # Subtract in two parts, so that a float32 logit loses nothing to the size of lse.
        lse = tl.load(lse_ptr + row) * 1.4426950408889634
        high = lse.to(tl.float32)
        low = (lse - high.to(tl.float64)).to(tl.float32)
        value_a = _load_logits(logits_ptr + place, token, width)
        value_b = _load_logits(logits_ptr + place, token + HALF, width)
        p_a, p_b = tl.exp2((value_a - high) - low), tl.exp2((value_b - high) - low)
        a, b = p_a * on_probs, p_b * on_probs
        if HAS_SUM:
            # One division for two: their denominators' product is at most (1 + c/2)^2.
            below_a, below_b = 1 + c * p_a, 1 + c * p_b
            share = (d_total * c) / (below_a * below_b)
            a += p_a * (share * below_b)
            b += p_b * (share * below_a)
        if (x >= start) & (x < start + BLOCK):
            d_x = tl.load(d_x_ptr + row).to(tl.float32)
            a += tl.where(token == x, d_x, 0.0)
            b += tl.where(token + HALF == x, d_x, 0.0)
        if (z >= start) & (z < start + BLOCK):
            # A special token's logit is the constant -inf: nothing flows back into it.
            d_z = tl.load(d_z_ptr + row).to(tl.float32)
            a += tl.where((token == z) & (value_a > -float("inf")), d_z, 0.0)
            b += tl.where((token + HALF == z) & (value_b > -float("inf")), d_z, 0.0)
        out_ptr = d_logits_ptr + place + token
        tl.store(out_ptr, a.to(d_logits_ptr.dtype.element_ty), mask=token < width)
        tl.store(out_ptr + HALF, b.to(d_logits_ptr.dtype.element_ty), mask=token + HALF < width)
        sum_a += a
        sum_b += b
    if FOR_BIAS:
        sums_ptr += tl.cast(tile, tl.int64) * width + token
        tl.store(sums_ptr, sum_a, mask=token < width)
        tl.store(sums_ptr + HALF, sum_b, mask=token + HALF < width)
