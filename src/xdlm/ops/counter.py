"""Random numbers as a pure function of (seed, stream, sample, position, step).

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) in integer
tensor arithmetic: the same bits on every device, for any batch split, with no state to save.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from xdlm.ops.device import has_triton

_WORD = 0xFFFFFFFF
_MUL = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Stream(IntEnum):
    """What a number is used for; distinct streams never share numbers."""

    TIME = 0
    CORRUPT = 1
    LABEL_DROPOUT = 2
    PRIOR = 3
    BRANCH = 4
    ACCEPT = 5
    TOKEN = 6
    NOISE = 7
    ROW_THINNING = 8
    ORDER = 9


def uniform(
    seed: int, stream: int | Tensor, sample: Tensor, position: Tensor, step: int | Tensor = 0
) -> Tensor:
    """Float64 numbers in [0, 1) with 53 random bits, at the broadcast of `sample` and `position`,
    and of `step` and `stream` if those are tensors.

    `sample` and `position` are int64 indices below 2^56 and 2^32; they may live on any device.
    """
    if sample.is_cuda and has_triton() and isinstance(step, int) and isinstance(stream, int):
        from xdlm.ops.fused_counter import fused_uniform

        return fused_uniform(seed, int(stream), sample, position, step)
    steps, streams = (
        torch.as_tensor(it, dtype=torch.int64, device=sample.device) for it in (step, stream)
    )
    sample, position, steps, streams = torch.broadcast_tensors(sample, position, steps, streams)
    counter = (
        position & _WORD,
        sample & _WORD,
        steps & _WORD,
        ((sample >> 32) & 0xFFFFFF) | (streams << 24),
    )
    key = (seed & _WORD, (seed >> 32) & _WORD)
    high, low, _, _ = philox(counter, key)
    bits = ((high << 21) | (low >> 11)) & ((1 << 53) - 1)
    return bits.to(torch.float64) * 2.0**-53


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox-4x32 on 32-bit words held in int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps modulo 2^64 in int64; shifting and masking still gives its true words.
        p0, p1 = c0 * _MUL[0], c2 * _MUL[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3
