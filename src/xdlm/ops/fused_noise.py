"""Noise on a batch, what each position counts for and which are looked at: one Triton kernel instead of
some seventy small steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from xdlm.ops.counter import Stream
from xdlm.ops.fused_counter import philox_uniform
from xdlm.structs import Coefs, Noised

_BLOCK = 256


def fused_noised(
    coefs: Coefs, vocab_size: int, x: Tensor, index: Tensor, seed: int, kept_rows: float
) -> Noised:
    """As `training.noised.noised_in_torch`, for `x` [B, L] and coefficients [B] on a GPU."""
    x = x.contiguous()
    batch, length = x.shape
    special_ids, rate = coefs.b.special_ids, coefs.rate
    z, picked = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    weight, scale = x.new_empty(2, batch, length, dtype=torch.float64)
    per_entry = [
        field.contiguous()
        for field in (coefs.alpha, coefs.b.tok, coefs.b.special, rate.tok, rate.special)
    ]
    _noise_kernel[(batch, triton.cdiv(length, _BLOCK))](
        x, index.contiguous(), *per_entry, z, weight, scale, picked, length,
        vocab_size - len(special_ids), seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF,
        CORRUPT=int(Stream.CORRUPT), THINNING=int(Stream.ROW_THINNING), SPECIAL=special_ids,
        RISING=tuple(sorted(special_ids)), N_SPECIAL=len(special_ids), KEPT=kept_rows, BLOCK=_BLOCK,
    )  # fmt: skip
    return Noised(z, weight, scale, picked)


@triton.jit(do_not_specialize=["length", "n_ordinary", "key0", "key1"])
def _noise_kernel(
    x_ptr, index_ptr, alpha_ptr, b_ptr, b_special_ptr, rate_ptr, rate_special_ptr,
    z_ptr, weight_ptr, scale_ptr, picked_ptr, length, n_ordinary, key0, key1,
    CORRUPT: tl.constexpr, THINNING: tl.constexpr, SPECIAL: tl.constexpr, RISING: tl.constexpr,
    N_SPECIAL: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = position < length
    at = entry.to(tl.int64) * length + position
    x = tl.load(x_ptr + at, mask=inside, other=0)
    sample = tl.load(index_ptr + entry) + tl.zeros((BLOCK,), tl.int64)
    alpha, b = tl.load(alpha_ptr + entry), tl.load(b_ptr + entry)
    rate = tl.load(rate_ptr + entry) + tl.zeros((BLOCK,), tl.float64)

    # z: below alpha the token stays; then come the special tokens in order, then the ordinary ones.
    u = _uniform(sample, position, key0, key1, CORRUPT, BLOCK)
    total = b * n_ordinary
    for i in tl.static_range(N_SPECIAL):
        total += tl.load(b_special_ptr + entry * N_SPECIAL + i)
    place = (u - alpha) / tl.maximum(1 - alpha, 1e-300) * total
    noise = tl.full((BLOCK,), -1, tl.int64)
    start = total * 0
    for i in tl.static_range(N_SPECIAL):
        end = start + tl.load(b_special_ptr + entry * N_SPECIAL + i)
        noise = tl.where((noise < 0) & (place < end), SPECIAL[i], noise)
        start = end
    rank = tl.floor((place - start) / tl.maximum(b, 1e-300))
    rank = tl.minimum(tl.maximum(rank, 0.0), n_ordinary - 1.0).to(tl.int64)
    for i in tl.static_range(N_SPECIAL):
        rank += (rank >= RISING[i]).to(tl.int64)
    if N_SPECIAL > 0:  # rounding may push a place past the last special token
        rank = tl.where(b > 0, rank, SPECIAL[N_SPECIAL - 1])
    z = tl.where(u < alpha, x, tl.where(noise < 0, rank, noise))

    # What it counts for: rate(z)/f(x, z).
    b_z = b + tl.zeros((BLOCK,), tl.float64)
    for i in tl.static_range(N_SPECIAL):
        here = z == SPECIAL[i]
        b_z = tl.where(here, tl.load(b_special_ptr + entry * N_SPECIAL + i), b_z)
        rate = tl.where(here, tl.load(rate_special_ptr + entry * N_SPECIAL + i), rate)
    reach = tl.where(z == x, alpha, 0.0) + b_z
    nothing = (rate <= 0) | (reach <= 0)
    weight = tl.where(nothing, 0.0, rate / tl.where(reach <= 0, 1.0, reach))

    # Whether to look at it: always where it changed, else by chance.
    picked = weight > 0
    chance = tl.full((BLOCK,), 1.0, tl.float64)
    if KEPT < 1:
        kept = tl.full((BLOCK,), KEPT, tl.float64)  # a bare constant would be rounded to float32
        cost = rate / (alpha / n_ordinary + b_z)
        if_kept = tl.minimum(tl.maximum(b_z / reach, kept * cost), 1.0)
        chance = tl.where(z == x, if_kept, 1.0)
        picked = picked & (_uniform(sample, position, key0, key1, THINNING, BLOCK) < chance)
    tl.store(z_ptr + at, z, mask=inside)
    tl.store(weight_ptr + at, weight, mask=inside)
    tl.store(scale_ptr + at, tl.where(picked, 1 / chance, 0.0), mask=inside)
    tl.store(picked_ptr + at, picked, mask=inside)


@triton.jit
def _uniform(sample, position, key0, key1, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """As `counter.uniform` at step 0."""
    high = ((sample >> 32) & 0xFFFFFF).to(tl.uint32) | (STREAM << 24)
    zero = tl.zeros((BLOCK,), tl.uint32)
    return philox_uniform(position.to(tl.uint32), sample.to(tl.uint32), zero, high, key0, key1)
