"""Whether a run of a sampler has the law of the reverse process, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from xdlm.noise import NoiseProcess
from xdlm.sampling import time_grid


def steps_off(process: NoiseProcess, probs: Tensor, steps: int, frames: Sequence[Tensor]) -> float:
    """By how many standard errors the transitions between successive states differ from the dense
    posterior, at worst; inf where one happened that cannot.

    The model predicts `probs` [N] everywhere, so positions are independent, and the counts of (z_t, z_s)
    over all of them, given those of z_t, are multinomial: one chi-square for each step, of cells that are
    expected at least five times, with the others of a row as one cell. `frames` are the states after each
    leg, or with pure noise before them.
    """
    legs = [*time_grid(process, steps, torch.zeros(1))][-(len(frames) - 1) :]
    return max(
        _excess(process, probs, leg, before, after)
        for leg, (before, after) in zip(legs, pairwise(frames), strict=True)
    )


def _excess(process: NoiseProcess, probs: Tensor, leg, before: Tensor, after: Tensor) -> float:
    size = process.vocab.size
    met = before.unique()
    law = torch.zeros(size, size, dtype=torch.float64)
    law[met] = process.posterior_between(
        probs.expand(1, len(met), size), met[None], leg.at_s, leg.at_t
    )[0]
    seen = torch.bincount((before * size + after).flatten(), minlength=size * size)
    seen = seen.view(size, size).double()
    if seen[law == 0].any():
        return torch.inf
    n = seen.sum(1, keepdim=True)
    alone = n * law >= 5
    seen, law = (torch.cat([v * alone, (v * ~alone).sum(1, keepdim=True)], 1) for v in (seen, law))
    expected = n * law
    counts = expected >= 5  # what is left of a row may be too little to say anything
    chi = ((seen - expected) ** 2 / expected)[counts].sum()
    free = (1 - law)[counts].sum()  # what chi is on average
    if free < 1:
        return 0.0
    spread = 2 / (9 * free)  # Wilson and Hilferty: the cube root is nearly normal
    return float(((chi / free) ** (1 / 3) - (1 - spread)) / spread**0.5)
