"""The training objective on a batch: noise it, run the trunk, run the head where it matters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.objective import (
    Weighting,
    elbo_weight,
    nelbo_of_stats,
    row_log_c,
    stratified_times,
)
from xdlm.ops import Stream, row_stats, uniform
from xdlm.ops.rows import Impl
from xdlm.structs import Batch


class LossSums(NamedTuple):
    """Sums over positions, to be divided once by the global number of tokens."""

    loss: Tensor
    """What is minimised, under the chosen weighting."""
    elbo: Tensor
    """The likelihood bound's integrand (detached); equal to `loss` under the ELBO weighting."""


@dataclass(frozen=True)
class DiffusionLoss:
    """Continuous-time loss of a denoiser under a noise process."""

    process: NoiseProcess
    weighting: Weighting = elbo_weight
    impl: Impl = "auto"
    kept_rows: float = 1.0
    label_dropout: float = 0.0
    precision: torch.dtype = torch.float32

    def __call__(
        self, denoiser: Denoiser, batch: Batch, *, seed: int, step: int, global_batch: int
    ) -> LossSums:
        """Noise and times depend only on the seed and on the samples' numbers, which run on from
        step to step in global batches, and never on how a batch was split."""
        x, index = batch.tokens, batch.index
        low, high = self.process.time_range
        t = stratified_times(seed, step, index % global_batch, global_batch, time_range=(low, high))
        position = torch.arange(x.shape[1], device=x.device)[None]
        coefs = self.process.coefs(t)
        z = self.process.corrupt_with(
            coefs, x, uniform(seed, Stream.CORRUPT, index[:, None], position)
        )
        label = self._drop_labels(batch.label, index, seed)
        with self._autocast(x.device):
            hidden = denoiser.trunk(z, t.float(), label)
        weight = self.weighting(coefs, x, z)
        rows, scale = self._rows_that_matter(weight > 0, x == z, index, position, seed)
        at_rows = coefs.index(rows[0])
        stats = row_stats(
            hidden[rows].to(self.precision), denoiser.head_weight, denoiser.head_bias,
            x[rows], z[rows], row_log_c(self.process, at_rows, x[rows]),
            mask_id=self.process.special_ids, impl=self.impl,
        )  # fmt: skip
        losses = nelbo_of_stats(at_rows, stats, x[rows], z[rows], self.weighting)
        loss = (losses.double() * scale).sum() * (high - low)
        if self.weighting is elbo_weight:
            return LossSums(loss, loss.detach())
        elbo = nelbo_of_stats(at_rows, stats, x[rows], z[rows])
        return LossSums(loss, (elbo.detach().double() * scale).sum() * (high - low))

    def _rows_that_matter(
        self, matters: Tensor, kept: Tensor, index: Tensor, position: Tensor, seed: int
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Rows of non-zero weight, unchanged tokens thinned; and what each then counts for."""
        if self.kept_rows < 1 and self.process.has_uniform_noise:
            u = uniform(seed, Stream.ROW_THINNING, index[:, None], position)
            matters = matters & (~kept | (u < self.kept_rows))
        rows = matters.nonzero(as_tuple=True)
        scale = torch.where(kept[rows], 1 / self.kept_rows, 1.0).double()
        return (rows[0], rows[1]), scale

    def _drop_labels(self, label: Tensor | None, index: Tensor, seed: int) -> Tensor | None:
        if label is None or self.label_dropout == 0:
            return label
        u = uniform(seed, Stream.LABEL_DROPOUT, index, torch.zeros_like(index))
        return torch.where(u < self.label_dropout, -1, label)

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.precision)
