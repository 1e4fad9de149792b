"""The training objectives on a batch: under noise, and of the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xdlm.config import RunConfig
from xdlm.models import Denoiser, head_stats, run_body, run_trunk
from xdlm.noise import NoiseProcess
from xdlm.objective import (
    WEIGHTINGS,
    Weighting,
    elbo_weight,
    nelbo_of_stats,
    row_log_c,
    row_losses,
    stratified_times,
)
from xdlm.ops import Stream, row_loss, row_stats, uniform
from xdlm.ops.gather import PickedRows
from xdlm.ops.rows import Impl
from xdlm.structs import Batch, Coefs, HeadRows, RowLosses, RowStats
from xdlm.training.noised import noised


class LossSums(NamedTuple):
    """Sums over positions, to be divided once by the global number of tokens."""

    loss: Tensor
    """What is minimised, under the chosen weighting."""
    elbo: Tensor
    """The likelihood bound's integrand (detached); equal to `loss` under the ELBO weighting."""
    rows: int = 0
    """Positions that the head was run on."""


class Loss(Protocol):
    """What training minimises."""

    def __call__(
        self, denoiser: Denoiser, batch: Batch, *, seed: int, step: int, global_batch: int
    ) -> LossSums: ...


def make_loss(config: RunConfig, process: NoiseProcess | None) -> Loss:
    """The objective that a configuration asks for; without noise, that of the next token."""
    if process is None:
        return NextTokenLoss(config.loss.impl)
    return DiffusionLoss(
        process, WEIGHTINGS[config.loss.weighting], config.loss.impl, config.loss.kept_rows,
        config.model.label_dropout,
    )  # fmt: skip


@dataclass(frozen=True)
class DiffusionLoss:
    """Continuous-time loss of a denoiser under a noise process: noise a batch, run the trunk, and its end
    and the head where it matters."""

    process: NoiseProcess
    weighting: Weighting = elbo_weight
    impl: Impl = "auto"
    kept_rows: float = 1.0
    label_dropout: float = 0.0

    def __call__(
        self, denoiser: Denoiser, batch: Batch, *, seed: int, step: int, global_batch: int
    ) -> LossSums:
        """Noise and times depend only on the seed and on the samples' numbers, which run on from
        step to step in global batches, and never on how a batch was split."""
        x, index = batch.tokens, batch.index
        low, high = self.process.time_range
        t = stratified_times(seed, step, index % global_batch, global_batch, time_range=(low, high))
        coefs = self.process.coefs(t).to(x.device)
        t, index = (v.to(x.device, non_blocking=True) for v in (t.float(), index))
        z, weight, scale, picked = noised(
            self.process, coefs, x, index, seed=seed, kept_rows=self.kept_rows
        )
        if batch.given is not None:
            z, picked = torch.where(batch.given, x, z), picked & ~batch.given
        if self.weighting is not elbo_weight:
            weight = self.weighting(coefs, x, z)
        pending = PickedRows(picked)
        label = self._drop_labels(batch.label, index, seed)
        states = run_body(denoiser, z, t, label)
        rows, n_picked = pending.order()
        at_rows = coefs.index(rows // x.shape[1])
        some = None if n_picked == x.numel() else rows
        hidden = denoiser.finish(states, some)
        x, z, weight, scale = (v.flatten() for v in (x, z, weight, scale))
        if some is not None:
            x, z, weight, scale = (v[some] for v in (x, z, weight, scale))
        scale = (high - low) * scale
        log_c = row_log_c(self.process, at_rows, x)
        if self.impl == "eager" or not denoiser.linear_head:
            stats = head_stats(
                denoiser, hidden, x, z, log_c, mask_id=self.process.special_ids, impl=self.impl
            )
            sums = self._by_autograd(at_rows, stats, x, z, scale)
        else:
            head = (denoiser.head_weight, denoiser.head_bias)
            head_rows = HeadRows(hidden, *head, x, z, log_c)
            sums = self._in_one_sweep(at_rows, head_rows, weight, scale)
        return sums._replace(rows=n_picked)

    def _in_one_sweep(
        self, coefs: Coefs, rows: HeadRows, weight: Tensor, scale: Tensor
    ) -> LossSums:
        """Loss and gradient block by block; the bound is added up on the side."""
        losses = row_losses(coefs, rows.x, rows.z, weight * scale)
        if self.weighting is elbo_weight:
            loss = row_loss(rows, losses, mask_id=self.process.special_ids, impl=self.impl)
            return LossSums(loss, loss.detach())
        elbo = torch.zeros((), dtype=torch.float64, device=rows.x.device)
        bound = elbo_weight(coefs, rows.x, rows.z)
        by_bound = torch.where(weight > 0, bound / weight, 0.0)

        def both(stats: RowStats, part: slice, out: RowLosses) -> None:
            losses(stats, part, out)
            elbo.add_((out.losses[part] * by_bound[part]).sum())

        loss = row_loss(rows, both, mask_id=self.process.special_ids, impl=self.impl)
        return LossSums(loss, elbo)

    def _by_autograd(
        self, coefs: Coefs, stats: RowStats, x: Tensor, z: Tensor, scale: Tensor
    ) -> LossSums:
        """The slow twin, and the way of a head that is not linear: gradients by automatic
        differentiation."""
        losses = nelbo_of_stats(coefs, stats, x, z, self.weighting)
        loss = (losses.double() * scale).sum()
        if self.weighting is elbo_weight:
            return LossSums(loss, loss.detach())
        with torch.no_grad():
            elbo = nelbo_of_stats(coefs, stats, x, z)
        return LossSums(loss, (elbo.double() * scale).sum())

    def _drop_labels(self, label: Tensor | None, index: Tensor, seed: int) -> Tensor | None:
        if label is None or self.label_dropout == 0:
            return label
        u = uniform(seed, Stream.LABEL_DROPOUT, index, torch.zeros_like(index))
        return torch.where(u < self.label_dropout, -1, label)


@dataclass(frozen=True)
class NextTokenLoss:
    """Cross-entropy of a causal model: `-sum_i log p(x_i | x_1 .. x_(i-1))` over all tokens of a row but
    the first, which has none before it.

    The sum is scaled by L/(L - 1), so that divided by the number of all tokens it is the mean over those
    that are predicted. Nothing is random, so the seed and the step decide nothing.
    """

    impl: Impl = "auto"

    def __call__(
        self, denoiser: Denoiser, batch: Batch, *, seed: int, step: int, global_batch: int
    ) -> LossSums:
        rows = next_token_rows(denoiser, batch.tokens)
        if self.impl == "eager":
            stats = row_stats(*rows, mask_id=None, impl="eager")
            total = (stats.lse - stats.logit_x).sum()
        else:
            total = row_loss(rows, _cross_entropy, mask_id=None, impl=self.impl)
        loss = total * (batch.tokens.numel() / len(rows.x))
        return LossSums(loss, loss.detach(), len(rows.x))


def next_token_nats(denoiser: Denoiser, tokens: Tensor, *, impl: Impl = "auto") -> Tensor:
    """`-log p(x_i | x_1 .. x_(i-1))` under a causal model for `tokens` [B, L], float64 [B, L - 1]."""
    stats = row_stats(*next_token_rows(denoiser, tokens), mask_id=None, impl=impl)
    return (stats.lse - stats.logit_x).view(len(tokens), -1)


def next_token_rows(denoiser: Denoiser, tokens: Tensor) -> HeadRows:
    """All positions but each row's last, with the token that follows as the one to predict. Of the four
    statistics a cross-entropy needs two: there is no noisy token, and no sum over the vocabulary."""
    assert denoiser.causal, "a model that sees later tokens would look its answers up"
    times = torch.zeros(len(tokens), device=tokens.device)
    hidden = run_trunk(denoiser, tokens, times)[:, :-1].flatten(0, 1)
    target = tokens[:, 1:].flatten()
    return HeadRows(hidden, denoiser.head_weight, denoiser.head_bias, target, target, None)


def _cross_entropy(stats: RowStats, part: slice, out: RowLosses) -> None:
    """`lse - logit_x`, and its derivatives."""
    torch.sub(stats.lse[part], stats.logit_x[part], out=out.losses[part])
    out.d.lse[part].fill_(1.0)  # unlike an assignment, this does not make a GPU wait
    out.d.logit_x[part].fill_(-1.0)
