"""A batch on its way into the loss: noise it, weigh its positions, pick those to look at."""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.noise import NoiseProcess
from xdlm.objective import elbo_weight
from xdlm.ops import Stream, uniform
from xdlm.ops.device import has_triton
from xdlm.structs import Coefs, Noised, align


def noised(
    process: NoiseProcess, coefs: Coefs, x: Tensor, index: Tensor, *, seed: int, kept_rows: float
) -> Noised:
    """Draw `z` for `x` [B, L]; everything random depends on the seed and the samples' numbers alone.

    Positions of no weight are never looked at, changed ones always. An unchanged token is looked at with
    probability `kept_rows rate(z)/(alpha/n + b(z))`, in proportion to what it costs a model that knows
    nothing and gives each of n tokens the same probability, and then counts for the inverse. So it never
    counts for more than 1/kept_rows such losses, where most, by a model that has learnt to copy, are next
    to nothing. A lower probability than that it is noise after all, `b(z)/f(x, z)`, is never used.
    """
    if not process.has_uniform_noise:
        kept_rows = 1.0
    if x.is_cuda and has_triton() and _by_coefficients_alone(process):
        from xdlm.ops.fused_noise import fused_noised

        return fused_noised(coefs, process.vocab.size, x, index, seed, kept_rows)
    return noised_in_torch(process, coefs, x, index, seed, kept_rows)


def _by_coefficients_alone(process: NoiseProcess) -> bool:
    """Whether noise is drawn as every process does it unless it says otherwise."""
    drawing = ("corrupt_with", "draw_noise")
    return all(getattr(type(process), f) is getattr(NoiseProcess, f) for f in drawing)


def noised_in_torch(
    process: NoiseProcess, coefs: Coefs, x: Tensor, index: Tensor, seed: int, kept_rows: float
) -> Noised:
    """The kernel's slow twin, and the CPU's way."""
    sample, position = index[:, None], torch.arange(x.shape[1], device=x.device)[None]
    z = process.corrupt_with(coefs, x, uniform(seed, Stream.CORRUPT, sample, position))
    weight = elbo_weight(coefs, x, z)
    picked = weight > 0
    if kept_rows == 1:
        return Noised(z, weight, picked.double(), picked)
    noise, alpha = coefs.b.at(z), align(coefs.alpha, z)
    n_ordinary = process.vocab.size - len(process.special_ids)
    cost = coefs.rate.at(z) / (alpha / n_ordinary + noise)
    if_kept = torch.maximum(noise / (alpha + noise), kept_rows * cost).clamp_max(1.0)
    chance = torch.where(z == x, if_kept, 1.0)
    picked = picked & (uniform(seed, Stream.ROW_THINNING, sample, position) < chance)
    return Noised(z, weight, torch.where(picked, 1 / chance, 0.0), picked)
