"""Likelihood by Monte Carlo: an upper bound on -log p(x), with its standard error.

The bound of a row is `start + integral + end` (see `xdlm.objective.bound`). The integral is estimated
at `draws` times, spread evenly over the time range and over the rows that are evaluated together; the
two ends at one noise draw each. Every token counts once, and averages are over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xdlm.data import Rows
from xdlm.errors import UserError
from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.objective import (
    bound_ends,
    nelbo_of_stats,
    row_log_c,
    step_kl_of_stats,
    stratified_times,
)
from xdlm.ops import Stream, row_stats, uniform
from xdlm.ops.rows import Impl
from xdlm.structs import Coefs, RowStats

#: Where the ends of the bound take their noise from, apart from the draws of the integral.
_START_STEP, _END_STEP = 1 << 30, (1 << 30) + 1


@dataclass(frozen=True)
class Likelihood:
    """A perplexity and what it is made of. `stderr` is that of `value`, over rows and draws."""

    value: float
    stderr: float
    nats_per_token: float
    nats_stderr: float
    bits_per_character: float | None
    n_tokens: int
    n_rows: int
    draws: int
    seed: int


@torch.no_grad()
def likelihood(
    denoiser: Denoiser,
    process: NoiseProcess,
    rows: Rows,
    *,
    draws: int = 4,
    batch: int = 16,
    seed: int = 0,
    max_rows: int | None = None,
    impl: Impl = "auto",
    on_batch: Callable[[int, int], None] | None = None,
) -> Likelihood:
    """Perplexity of packed text: all rows and the tail, or the first `max_rows` rows."""
    if draws < 1:
        raise UserError(f"likelihood needs at least one draw, got {draws}")
    nats: list[Tensor] = []
    lengths: list[int] = []
    whole = len(rows) if max_rows is None else min(max_rows, len(rows))
    use_tail = rows.tail.size > 0 and (max_rows is None or max_rows > len(rows))
    total = whole + use_tail
    if total == 0:
        raise UserError("there is no text to evaluate")
    device = denoiser.head_weight.device
    for first, part in _batches(rows, whole, use_tail, batch):
        x = torch.from_numpy(part.astype(np.int64)).to(device)
        index = torch.arange(first, first + len(x), device=device)
        nats.append(row_bounds(denoiser, process, x, index, draws=draws, seed=seed, impl=impl).cpu())
        lengths += [x.shape[1]] * len(x)
        if on_batch is not None:
            on_batch(first + len(x), total)
    is_everything = total == len(rows) + (rows.tail.size > 0)
    return summarise(
        torch.cat(nats), torch.tensor(lengths), draws=draws, seed=seed,
        n_characters=rows.n_characters if is_everything else None,
    )  # fmt: skip


def row_bounds(
    denoiser: Denoiser,
    process: NoiseProcess,
    x: Tensor,
    index: Tensor,
    *,
    draws: int,
    seed: int,
    impl: Impl = "auto",
) -> Tensor:
    """Estimates of each row's bound in nats, [B, draws], all unbiased; they share the two ends of
    the bound and differ in the time of the integrand. Takes draws + 2 forward passes."""
    low, high = process.time_range
    n = len(x)
    estimates = torch.zeros(n, draws, dtype=torch.float64, device=x.device)
    place = torch.arange(n, device=x.device)
    for draw in range(draws):
        # One stratum for every (row, draw) of this batch.
        t = stratified_times(
            seed, int(index[0]), place * draws + draw, n * draws, time_range=(low, high)
        )
        coefs = process.coefs(t)
        z = _noised(process, coefs, x, index, seed, draw)
        stats = _stats(denoiser, process, coefs, t, x, z, impl)
        estimates[:, draw] = nelbo_of_stats(coefs, stats, x, z).double().sum(1) * (high - low)
    zeros = torch.zeros(n, dtype=torch.float64, device=x.device)
    for end, t_end, step in zip(
        bound_ends(process, zeros), (1.0, low), (_START_STEP, _END_STEP), strict=True
    ):
        z = _noised(process, end.noisy, x, index, seed, step)
        stats = _stats(denoiser, process, end.target, zeros + t_end, x, z, impl)
        kl = step_kl_of_stats(process, end.target, end.noisy, stats, x, z)
        estimates += kl.double().sum(1, keepdim=True)
    return estimates


def summarise(
    estimates: Tensor, lengths: Tensor, *, draws: int, seed: int, n_characters: int | None
) -> Likelihood:
    """Token-weighted mean and its standard error.

    Rows count as independent samples of a ratio. A single row has only its draws to go by; they are
    stratified, so their spread overstates the error rather than understating it.
    """
    nats = estimates.mean(1)
    n_rows, n_tokens = len(nats), int(lengths.sum())
    mean = float(nats.sum() / n_tokens)
    if n_rows > 1:
        residual = nats - mean * lengths
        stderr = math.sqrt(float((residual**2).sum()) * n_rows / (n_rows - 1)) / n_tokens
    else:
        spread = float(estimates.std()) if draws > 1 else math.nan
        stderr = spread / math.sqrt(draws) / n_tokens
    value = math.exp(mean)
    bits = None if not n_characters else float(nats.sum()) / n_characters / math.log(2)
    return Likelihood(
        value=value, stderr=value * stderr, nats_per_token=mean, nats_stderr=stderr,
        bits_per_character=bits, n_tokens=n_tokens, n_rows=n_rows, draws=draws, seed=seed,
    )  # fmt: skip


def _batches(
    rows: Rows, whole: int, use_tail: bool, batch: int
) -> Iterator[tuple[int, NDArray[np.unsignedinteger]]]:
    for first in range(0, whole, batch):
        yield first, rows.rows[first : min(first + batch, whole)]
    if use_tail:
        yield whole, rows.tail[None]


def _noised(
    process: NoiseProcess, coefs: Coefs, x: Tensor, index: Tensor, seed: int, step: int
) -> Tensor:
    position = torch.arange(x.shape[1], device=x.device)[None]
    u = uniform(seed, Stream.CORRUPT, index[:, None], position, step)
    return process.corrupt_with(coefs, x, u)


def _stats(
    denoiser: Denoiser,
    process: NoiseProcess,
    coefs: Coefs,
    t: Tensor,
    x: Tensor,
    z: Tensor,
    impl: Impl,
) -> RowStats:
    """Every row: evaluation never thins."""
    hidden = denoiser.trunk(z, t.float())
    return row_stats(
        hidden, denoiser.head_weight, denoiser.head_bias, x, z, row_log_c(process, coefs, x),
        mask_id=process.special_ids, impl=impl,
    )  # fmt: skip
