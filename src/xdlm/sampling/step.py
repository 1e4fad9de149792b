"""One reverse step, exact, without building the posterior over the vocabulary.

A token z_t is either noise, with probability `b_t(z)/f_t(x~, z)`, or still the clean token. If it is
the clean token it stays. If it is noise, z_s is

    z_t itself          with probability alpha_ts b_s(z)/b_t(z)        (the noise came before s)
    a draw from x~      with probability alpha_s b_ts(z)/b_t(z)        (it was clean at s)
    a draw from b_s     with probability (1 - alpha_s) b_ts(z)/b_t(z)  (it was other noise at s)

These three do not depend on the model, so they are decided first. Positions that stay need nothing
more. The rest ("woken") need the model only to learn whether z_t is noise (never in doubt for a
special token) or to draw from x~.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.noise import NoiseProcess
from xdlm.ops import categorical, draw_and_weigh, forbid
from xdlm.structs import Coefs, align, batch_times, check_order, is_special


class StepUniforms(NamedTuple):
    """The random numbers of a step, each [B, L] in [0, 1), for one use each."""

    branch: Tensor
    accept: Tensor
    token: Tensor
    noise: Tensor


class Plan(NamedTuple):
    """What is decided before the model runs; all [B, L] bool."""

    from_model: Tensor
    from_noise: Tensor
    in_doubt: Tensor

    @property
    def needs_head(self) -> Tensor:
        return self.from_model | (self.from_noise & self.in_doubt)

    @property
    def surely(self) -> Tensor:
        """Those of them that are noise, and to be drawn from the model."""
        return self.from_model & ~self.in_doubt

    @property
    def perhaps(self) -> Tensor:
        """Those of them that need the head unless they are seen to be no noise without it."""
        return (self.from_model | self.from_noise) & self.in_doubt


def plan_step(
    process: NoiseProcess, at_s: Coefs, at_t: Coefs, z: Tensor, branch: Tensor, free: Tensor | None
) -> Plan:
    """Choose each position's branch; positions outside `free` stay whatever happens."""
    noise_t = at_t.b.at(z)
    redrawn = process.bridge(at_s, at_t).b.at(z)
    wake = torch.where(noise_t > 0, redrawn / torch.where(noise_t > 0, noise_t, 1.0), 0.0)
    woken = branch < wake
    if free is not None:
        woken = woken & free
    # Given that it wakes, branch/wake is uniform again.
    wants_model = branch < wake * align(at_s.alpha, z)
    in_doubt = ~is_special(z, process.special_ids) & (align(at_t.alpha, z) > 0)
    return Plan(woken & wants_model, woken & ~wants_model, in_doubt)


def is_noise(at_t: Coefs, p_z: Tensor, z: Tensor, accept: Tensor) -> Tensor:
    """For gathered rows [R]: whether z is noise, given the probability that the model gives it."""
    noise = at_t.b.at(z)
    return accept * (at_t.alpha * p_z + noise) < noise


def ancestral_step(
    process: NoiseProcess,
    logits: Tensor,
    z: Tensor,
    s: Tensor | float,
    t: Tensor | float,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw `z_s ~ p(z_s | z_t = z)` from logits [B, L, V]: a three-way choice and at most one draw."""
    process.check_logits(logits, z)
    process.check_noisy(z)
    s, t = batch_times(s, z), batch_times(t, z)
    check_order(s, t)
    uniforms = StepUniforms(*(
        torch.rand(z.shape, generator=generator, device=z.device, dtype=torch.float64)
        for _ in range(4)
    ))  # fmt: skip
    at_s, at_t = process.coefs(s), process.coefs(t)
    plan = plan_step(process, at_s, at_t, z, uniforms.branch, None)
    rows = plan.needs_head.nonzero(as_tuple=True)
    row_logits = forbid(logits[rows], process.special_ids)
    drawn, p_z = draw_and_weigh(row_logits, uniforms.token[rows], z[rows])
    of_rows = at_t.index(rows[: t.ndim])
    noisy = is_noise(of_rows, p_z, z[rows], uniforms.accept[rows])
    return apply_plan(process, at_s, z, plan, uniforms.noise, rows, noisy, drawn)


def apply_plan(
    process: NoiseProcess,
    at_s: Coefs,
    z: Tensor,
    plan: Plan,
    noise: Tensor,
    rows: tuple[Tensor, ...],
    noisy: Tensor,
    drawn: Tensor,
) -> Tensor:
    """The next state, once the rows that needed the model have been decided."""
    other, fresh = apply_noise(process, at_s, z, plan, noise)
    if rows[0].numel() == 0:
        return fresh
    replacement = torch.where(plan.from_model[rows], drawn, other[rows])
    fresh[rows] = torch.where(noisy, replacement, z[rows])
    return fresh


def apply_noise(
    process: NoiseProcess, at_s: Coefs, z: Tensor, plan: Plan, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Noise for every position, and the state where that which is certain has been done: a position in
    doubt moves only if its row finds it to be noise."""
    other = process.draw_noise(at_s.b, noise)
    return other, torch.where(plan.from_noise & ~plan.in_doubt, other, z)


def dense_step(
    process: NoiseProcess,
    logits: Tensor,
    z: Tensor,
    s: Tensor | float,
    t: Tensor | float,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The slow twin of `ancestral_step`: builds the whole posterior and draws from it."""
    process.check_logits(logits, z)
    probs = forbid(logits, process.special_ids).double().softmax(-1)
    posterior = process.posterior(probs, z, s, t)
    u = torch.rand(z.shape, generator=generator, device=z.device, dtype=torch.float64)
    return categorical(posterior.log().flatten(0, -2), u.flatten()).view(z.shape)
