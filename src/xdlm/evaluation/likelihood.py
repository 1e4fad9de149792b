"""Likelihood by Monte Carlo: an upper bound on -log p(x), with its standard error.

The bound of a row is `start + integral + end` (see `xdlm.objective.bound`). The integral is estimated
at `draws` times per row, the two ends at one noise draw each. Every token counts once, and averages
are over tokens.

Times are drawn more densely towards both ends, where the integrand consists of rare large values: at time
t a token is noise with probability about t and then costs about 1/t. At uniform times much of an estimate
would depend on rare events, which its standard error might have missed as well.

The times of a group of n rows form a grid of n x draws points, equally spaced until they are bent towards
the ends, under one random shift. Row i looks at points i, i + n, i + 2n, ..., so neighbouring rows look at
nearly the same times. Their differences then show how rows and noise vary, but not how the integrand varies
with time, which the grid averages out. The standard error is estimated from these differences. Rows are
evaluated in random order, so that neighbours are not from the same page. How many rows go through the model
at a time changes nothing.

All that is random depends on the seed and on the text. It is the same for every model, so that differences
of models are not noise, and different for every text, so that the errors of several are independent.

A causal model's likelihood is exact: it needs no draws, every token counts that has one before it in its
row, and the standard error is that over rows alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xdlm.data import Rows
from xdlm.errors import UserError
from xdlm.models import Denoiser, head_stats, run_trunk
from xdlm.models.contract import in_eval_mode
from xdlm.noise import NoiseProcess
from xdlm.objective import (
    bound_ends,
    nelbo_of_stats,
    row_log_c,
    step_kl_of_stats,
    stratified_times,
)
from xdlm.ops import Stream, uniform
from xdlm.ops.rows import Impl
from xdlm.structs import Coefs, RowStats
from xdlm.training.loss import next_token_nats
from xdlm.training.parallel import World

T = TypeVar("T")
#: Rows whose times form one grid.
_GROUP = 16
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
    row_nats: tuple[float, ...] = ()
    """Of each row, in an order that is the same for all models; without the tail, which has another length.
    Differences of two models row by row tell far more surely which is better than their two errors."""


@torch.no_grad()
@in_eval_mode
def likelihood(
    denoiser: Denoiser,
    process: NoiseProcess | None,
    rows: Rows,
    *,
    draws: int = 4,
    batch: int = 16,
    seed: int = 0,
    max_rows: int | None = None,
    impl: Impl = "auto",
    on_batch: Callable[[int, int], None] | None = None,
    world: World | None = None,
) -> Likelihood:
    """Perplexity of packed text: all rows and the tail, or the first `max_rows` rows. A model without a
    noise process is causal, and one pass tells its likelihood, whatever the number of draws.

    The processes of a `world` share the batches; all get the same result, whatever their number.
    """
    passes = likelihood_by_passes(
        denoiser, process, rows, draws=draws, batch=batch, seed=seed, max_rows=max_rows, impl=impl,
        on_batch=on_batch, world=world, fill=True,
    )  # fmt: skip
    return _to_the_end(passes)


@torch.no_grad()
def likelihood_by_passes(
    denoiser: Denoiser,
    process: NoiseProcess | None,
    rows: Rows,
    *,
    draws: int,
    batch: int,
    seed: int,
    max_rows: int | None = None,
    impl: Impl = "auto",
    on_batch: Callable[[int, int], None] | None = None,
    world: World | None = None,
    fill: bool = False,
) -> Generator[None, None, Likelihood]:
    """The same as a generator that yields after each pass of the model, for callers with other work to do
    in between. If all text is less than a batch, `fill` lets a pass take several draws."""
    if draws < 1:
        raise UserError(f"likelihood needs at least one draw, got {draws}")
    if batch < 1 or (max_rows is not None and max_rows < 1) or seed < 0:
        raise UserError("batch and max_rows must be at least 1, and the seed not negative")
    rows.check_classes(denoiser.n_classes)
    whole, use_tail = counted_rows(rows, max_rows)
    total = whole + use_tail
    unpredicted = 0 if process is not None else 1
    if total == 0 or (whole == 0 and rows.tail.size <= unpredicted):
        raise UserError("there is no text to evaluate")
    draws = draws if process is not None else 1
    if process is not None:
        process.check_states(denoiser.n_states)
    device = denoiser.device
    key = _seed_of_text(seed, rows)
    groups = _groups(len(rows), whole, use_tail, key)
    even = torch.cat([_even_times(key, group, draws) for group in groups])
    order = np.concatenate(groups)
    batches = _batches(whole, use_tail, batch)
    # The same for every batch, since processes may have to meet at each pass.
    at_once = max(1, batch // max(1, whole)) if fill else 1
    world = world if world is not None else World()
    found = {}
    done = 0
    for number in world.deal(len(batches)):
        part = batches[number]
        index = order[part]
        tokens = rows.tail[None] if index[0] == len(rows) else rows.take(index)
        x = torch.from_numpy(tokens.astype(np.int64))
        if process is not None:
            process.check_data(x)
        x = x.to(device)
        if process is None:
            nats = next_token_nats(denoiser, x, impl=impl).sum(1, keepdim=True)
        else:
            classes = rows.labels(index) if denoiser.n_classes else None
            nats = yield from _row_bounds(
                denoiser, process, x, torch.from_numpy(index).to(device), even[part].to(device),
                label=None if classes is None else torch.from_numpy(classes).to(device),
                seed=key, impl=impl, at_once=at_once,
            )  # fmt: skip
        found[number] = nats.cpu()
        yield
        done += len(x)
        if on_batch is not None:
            on_batch(done, total)
    found = world.collect(found)
    estimates = torch.cat([found[number] for number in range(len(batches))])
    lengths = [
        (rows.tail.size if group[0] == len(rows) else rows.length) - unpredicted for group in groups
    ]
    is_everything = total == len(rows) + (rows.tail.size > 0)
    return summarise(
        list(estimates.split([len(group) for group in groups])), lengths, seed=seed,
        n_characters=rows.n_characters if is_everything else None,
    )  # fmt: skip


def counted_rows(rows: Rows, max_rows: int | None) -> tuple[int, bool]:
    """How many whole rows are looked at, and whether the tail is too."""
    if max_rows is None:
        return len(rows), rows.tail.size > 0
    return min(max_rows, len(rows)), rows.tail.size > 0 and max_rows > len(rows)


def row_bounds(
    denoiser: Denoiser,
    process: NoiseProcess,
    x: Tensor,
    index: Tensor,
    even: Tensor,
    *,
    label: Tensor | None = None,
    seed: int,
    impl: Impl = "auto",
    at_once: int = 1,
) -> Tensor:
    """Estimates of each row's bound in nats, [B, draws], all unbiased; they share the two ends of the
    bound and differ in the time of the integrand, which `even` [B, draws] in [0, 1) decides. Takes a
    forward pass for every `at_once` draws, and two more."""
    return _to_the_end(
        _row_bounds(
            denoiser, process, x, index, even, label=label, seed=seed, impl=impl, at_once=at_once
        )
    )


def _row_bounds(
    denoiser: Denoiser,
    process: NoiseProcess,
    x: Tensor,
    index: Tensor,
    even: Tensor,
    *,
    label: Tensor | None,
    seed: int,
    impl: Impl,
    at_once: int,
) -> Generator[None, None, Tensor]:
    """The same as a generator that yields after each pass."""
    noised = Noised(denoiser, process, x, index, seed, label=label, impl=impl)
    inner = []
    for first in range(0, even.shape[1], at_once):
        inner.append(noised.integrands(even[:, first : first + at_once], first))
        yield
    return torch.cat(inner, 1) + noised.ends(0)[:, None]


def _to_the_end(passes: Generator[None, None, T]) -> T:
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return cast(T, end.value)


@dataclass(frozen=True)
class Noised:
    """The terms of the bound for rows `x` [B, L], summed over positions: of all, or of those alone where
    `free` [B, L] holds. The others then stay clean, and the bound is one on -log p(free | others), that of
    the sampler which never touches them."""

    denoiser: Denoiser
    process: NoiseProcess
    x: Tensor
    index: Tensor
    """[B], what decides a row's noise, together with the seed."""
    seed: int
    free: Tensor | None = None
    label: Tensor | None = None
    """[B], the rows' classes, where the model knows of any."""
    impl: Impl = "auto"
    padding: Tensor | None = None
    """[B, L], where a row has no tokens; `free` does not hold there."""

    def integrands(self, even: Tensor, first: int) -> Tensor:
        """Of several draws in one pass, the numbers `first` and on, at times that `even` [B, draws]
        decides; float64 [B, draws]."""
        n = even.shape[1]
        if n == 1:
            return self.integrand(even[:, 0], first)[:, None]
        draw = torch.arange(first, first + n, device=even.device).repeat(len(even))
        return self._repeated(n).integrand(even.flatten(), draw).view(even.shape)

    def _repeated(self, times: int) -> Noised:
        """Each row repeated, its copies side by side."""

        def each(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.repeat_interleave(times, 0)

        return replace(
            self, x=self.x.repeat_interleave(times, 0), index=self.index.repeat_interleave(times, 0),
            free=each(self.free), label=each(self.label), padding=each(self.padding),
        )  # fmt: skip

    def integrand(self, even: Tensor, draw: int | Tensor) -> Tensor:
        """At times that `even` [B] in [0, 1) decides, weighted so that its mean over `even` is the
        integral over time; float64 [B]. The number of the draw, or of each row's [B], decides the noise."""
        t, weight = bent_times(even, self.process.time_range)
        coefs = self.process.coefs(t)
        z = self._noisy(coefs, draw)
        stats = self._stats(coefs, t, z)
        return self._total(nelbo_of_stats(coefs, stats, self.x, z)) * weight

    def ends(self, draw: int) -> Tensor:
        """The start and the end of the bound, at one draw of noise each; float64 [B]."""
        zeros = torch.zeros(len(self.x), dtype=torch.float64, device=self.x.device)
        total = zeros
        for end, t_end, step in zip(
            bound_ends(self.process, zeros), (1.0, self.process.time_range[0]),
            (_START_STEP, _END_STEP), strict=True,
        ):  # fmt: skip
            z = self._noisy(end.noisy, step + 2 * draw)
            stats = self._stats(end.target, zeros + t_end, z)
            kl = step_kl_of_stats(self.process, end.target, end.noisy, stats, self.x, z)
            total = total + self._total(kl)
        return total

    def _noisy(self, coefs: Coefs, step: int | Tensor) -> Tensor:
        position = torch.arange(self.x.shape[1], device=self.x.device)[None]
        step = step[:, None] if isinstance(step, Tensor) else step
        u = uniform(self.seed, Stream.CORRUPT, self.index[:, None], position, step)
        z = self.process.corrupt_with(coefs, self.x, u)
        return z if self.free is None else torch.where(self.free, z, self.x)

    def _stats(self, coefs: Coefs, t: Tensor, z: Tensor) -> RowStats:
        """Every row: evaluation never thins."""
        hidden = run_trunk(self.denoiser, z, t.float(), self.label, self.padding)
        return head_stats(
            self.denoiser, hidden, self.x, z, row_log_c(self.process, coefs, self.x),
            mask_id=self.process.special_ids, impl=self.impl,
        )  # fmt: skip

    def _total(self, nats: Tensor) -> Tensor:
        """Nats of each row; what a frozen position would cost is no part of the bound."""
        nats = nats.double()
        return (nats if self.free is None else torch.where(self.free, nats, 0.0)).sum(1)


def bent_times(even: Tensor, time_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Times `low + (high - low) (1 - cos(pi u))/2` for u uniform on [0, 1], and dt/du: the weights that
    make an average over u an integral over time."""
    low, high = time_range
    angle = math.pi * even
    return low + (high - low) * (1 - angle.cos()) / 2, (high - low) * math.pi / 2 * angle.sin()


def summarise(
    estimates: list[Tensor], lengths: list[int], *, seed: int, n_characters: int | None
) -> Likelihood:
    """Token-weighted mean of groups of estimates [n, draws] of rows of equal length, and its error.

    The variance of a row is half the mean squared difference of neighbours, or better a sixth of that
    of second differences, which what changes steadily with time does not enter. A group of one row (the
    tail) is taken to vary as the others do. Where all are of one row, the draws of each are all there
    is to go by, and they do not show how rows differ.
    """
    draws = estimates[0].shape[1]
    rows = [group.mean(1) for group in estimates]
    n_rows = sum(map(len, rows))
    n_tokens = sum(len(group) * length for group, length in zip(rows, lengths, strict=True))
    total = float(sum(group.sum() for group in rows))
    spread = [squares(group) for group in rows if len(group) > 1]
    if spread:
        variance = n_rows * float(torch.cat(spread).mean())
    elif draws > 1:
        variance = sum(float(squares(group[0]).mean()) / draws for group in estimates)
    else:
        variance = math.nan
    mean, stderr = total / n_tokens, math.sqrt(variance) / n_tokens
    value = math.exp(mean) if mean < 700 else math.inf
    return Likelihood(
        value=value, stderr=value * stderr, nats_per_token=mean, nats_stderr=stderr,
        bits_per_character=None if not n_characters else total / n_characters / math.log(2),
        n_tokens=n_tokens, n_rows=n_rows, draws=draws, seed=seed,
        row_nats=tuple(nats for group in rows if len(group) > 1 for nats in group.tolist()),
    )  # fmt: skip


def squares(values: Tensor) -> Tensor:
    """Estimates of the variance of one of these, from neighbours or from threes of them."""
    return values.diff() ** 2 / 2 if len(values) == 2 else values.diff(n=2) ** 2 / 6


def row_order(rows: Rows, seed: int) -> NDArray[np.int64]:
    """The numbers of the rows that `row_nats` are of, where all rows are read."""
    groups = _groups(len(rows), len(rows), False, _seed_of_text(seed, rows))
    return np.concatenate([group for group in groups if len(group) > 1])


def _seed_of_text(seed: int, rows: Rows) -> int:
    digest = hashlib.sha256(f"{seed} {rows.digest}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _groups(n_rows: int, whole: int, use_tail: bool, seed: int) -> list[NDArray[np.int64]]:
    """Row numbers, in random order and groups of nearly equal size; the tail, number `n_rows`, comes
    last."""
    order = np.random.Generator(np.random.Philox(seed)).permutation(whole)
    groups = np.array_split(order, -(-whole // _GROUP)) if whole else []
    return [*groups, np.array([n_rows])] if use_tail else groups


def _even_times(seed: int, group: NDArray[np.int64], draws: int) -> Tensor:
    """The grid of a group's rows, [n, draws]."""
    place = torch.arange(len(group))[:, None] + len(group) * torch.arange(draws)
    return stratified_times(seed, int(group[0]), place, place.numel())


def _batches(whole: int, use_tail: bool, batch: int) -> list[slice]:
    """Of rows in their order; the tail has another length and goes alone."""
    batches = [slice(start, min(start + batch, whole)) for start in range(0, whole, batch)]
    return [*batches, slice(whole, whole + 1)] if use_tail else batches
