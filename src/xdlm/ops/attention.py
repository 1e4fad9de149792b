"""Attention, by those of torch's ways whose gradients are right."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

#: Keys that cuDNN's backward pass takes at a time, and after how many it looks where they end.
_TILE, _HALF = 128, 64
_BUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """`softmax(q k^T / sqrt(d)) v`, for [B, heads, L, d] each."""
    with right_gradients(key.shape[-2], wanted=query.requires_grad):
        return scaled_dot_product_attention(query, key, value, mask, is_causal=causal)


def right_gradients(keys: int, *, wanted: bool) -> AbstractContextManager[None]:
    """Within it, torch does not choose cuDNN where gradients are wanted and may come out as NaN: on Hopper
    its backward pass takes zeros for keys where the second half of the last tile is empty, and overflows if
    all scores of a query lie below -88 (pytorch issue 196678)."""
    return sdpa_kernel(_BUT_CUDNN) if wanted and keys % _TILE == _HALF else nullcontext()
