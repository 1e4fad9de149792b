"""Exact draws from softmax rows, one uniform number per row.

Adding float32 Gumbel noise to logits starves the tail: 24-bit uniforms bound the noise, so tokens of
probability below about 1e-7 hardly ever win. Here the distribution function is inverted with sums in
float64 and a 53-bit uniform, so a token of probability p comes out with frequency p down to 1e-15.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.ops.rows import work_dtype

_BLOCK = 512


def draw_and_weigh(logits: Tensor, uniform: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """A draw from each row of `logits` [R, V], and the probability (float64) that it gives `z` [R]."""
    logits = logits.to(work_dtype(logits.dtype))
    log_p = logits.gather(1, z[:, None])[:, 0] - logits.logsumexp(-1)
    return categorical(logits, uniform), log_p.double().exp()


def categorical(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw one index per row of `logits` [R, V] (-inf = impossible) from `uniform` [R] in [0, 1).

    Two levels: the sum of each block of the vocabulary picks a block, a running sum inside that
    block picks the token, so that float64 is only ever held for R x V/512 and R x 512 numbers.
    """
    rows, size = logits.shape
    if rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    logits = logits.to(work_dtype(logits.dtype))
    weight = torch.exp(logits - logits.amax(-1, keepdim=True))
    width = min(size, _BLOCK)
    weight = torch.nn.functional.pad(weight, (0, -size % width)).view(rows, -1, width)
    block_cdf = weight.sum(-1, dtype=torch.float64).cumsum(-1)
    # On a GPU the check would have to be waited for.
    if logits.device.type == "cpu" and not bool((block_cdf[:, -1] > 0).all()):
        raise UserError("predictions are not numbers, or leave no token possible")
    target = uniform.double()[:, None] * block_cdf[:, -1:]
    block = _first_above(block_cdf, target)
    before = torch.where(block > 0, block_cdf.gather(1, (block - 1).clamp_min(0)), 0.0)
    inside = weight[torch.arange(rows, device=logits.device), block[:, 0]]
    token_cdf = inside.double().cumsum(-1)
    # The two levels add in different orders; keep the target inside the chosen block's own total.
    within = torch.minimum(target - before, token_cdf[:, -1:] * (1 - 2.0**-52)).clamp_min(0)
    token = _first_above(token_cdf, within)
    # Beyond the last only where nothing is a number.
    return (block * width + token)[:, 0].clamp_max(size - 1)


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """The first index at which `cdf` exceeds `target`: never one of zero probability."""
    return torch.searchsorted(cdf, target, right=True).clamp_max(cdf.shape[-1] - 1)
