"""The two ends of the likelihood bound, so that a truncated time range still gives a bound.

    -log p(x) <= start + (integral of nelbo over [t_min, t_max]) + end

`start` is the step from pure noise (alpha = 0, what a sampler starts from) to t_max, and `end` the
last denoising step from t_min to the data. Both are ordinary finite steps of the same chain, so both
are `step_kl`. (The textbook prior term KL(q(z_1 | x) || pi) is infinite for masked noise whenever
alpha_1 > 0; the finite step from alpha = 0 is what a sampler really does, and it is finite.)
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from xdlm.noise import NoiseProcess
from xdlm.objective.losses import step_kl_between
from xdlm.structs import Coefs


class End(NamedTuple):
    """One end of the bound: noise the data with `noisy`, predict, then take a step to `target`."""

    noisy: Coefs
    target: Coefs

    def loss(self, process: NoiseProcess, logits: Tensor, x: Tensor, z: Tensor) -> Tensor:
        return step_kl_between(process, self.target, self.noisy, logits, x, z)


def bound_ends(process: NoiseProcess, like: Tensor) -> tuple[End, End]:
    """The start (pure noise to t_max) and the end (t_min to data), shaped as the times `like`."""
    zero = like.double() * 0
    t_min, t_max = process.time_range
    start = End(process.terminal(zero), process.coefs(zero + t_max))
    end = End(process.coefs(zero + t_min), process.coefs(zero))
    return start, end
