"""Attention of transformers models whose keys and values pass through somebody else's hands.

The library dispatches attention by name. Under ours it is its own (sdpa), but for what an `Exchange` puts
in the place of keys and values while one is at work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.models.contract import Exchange

NAME = "xdlm_exchange"
#: Who is at work, and the number of the layer that comes next.
_AT_WORK: ContextVar[tuple[Exchange, Iterator[int]] | None] = ContextVar("exchange", default=None)
REFUSED = "a {} model cannot be run on a part of a row: leave refresh out"


@contextmanager
def exchanging(exchange: Exchange) -> Iterator[None]:
    """Layers of attention, in the order in which they run, go through an exchange."""
    token = _AT_WORK.set((exchange, iter(range(1 << 30))))
    try:
        yield
    finally:
        _AT_WORK.reset(token)


def use_exchanges(lm: Any) -> None:
    """Have a model's attention look for exchanges."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    lm.set_attn_implementation(NAME)


def first_place(lm: Any) -> int:
    """The number of a row's first position: RoBERTa and its kin begin behind that of padding, and count the
    tokens that are none."""
    for module in lm.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1
    return 0


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    at_work = _AT_WORK.get()
    if at_work is not None:
        if attention_mask is not None:  # a window, whose place among other keys nobody knows
            raise UserError(REFUSED.format(module.config.model_type))
        exchange, layers = at_work
        key, value = exchange(next(layers), key, value)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **more)


class _Rehearsal:
    """Keeps all keys and values, and hands them back around a stretch."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def keep(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.layers.append((k, v))
        return k, v

    def recall(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those that were kept, with the stretch's own over them."""
        n, found = k.shape[2], []
        for old, new in zip(self.layers[layer], (k, v), strict=True):
            found.append(torch.cat([old[:, :, :2], new, old[:, :, 2 + n :]], dim=2))
        return found[0], found[1]


@torch.no_grad()
def rehearse(denoiser: Any, lm: Any) -> None:
    """That a stretch, run alone among remembered keys and values, has the states that it has in the row."""
    z = torch.arange(8, device=lm.device)[None] % lm.config.vocab_size
    t, rehearsal, was_training = torch.zeros(1, device=lm.device), _Rehearsal(), lm.training
    try:
        lm.eval()
        row = denoiser.trunk(z, t)
        whole = denoiser.trunk_at(z, t, 0, rehearsal.keep)
        part = denoiser.trunk_at(z[:, 2:6], t, 2, rehearsal.recall)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise UserError(REFUSED.format(lm.config.model_type)) from error
    finally:
        lm.train(was_training)
    lag, scale = denoiser.lag, 1e-2 * (float(row.abs().max()) or 1.0)
    apart = max(
        float((whole - row).abs().max()), float((part[:, lag:] - row[:, 2 + lag : 6]).abs().max())
    )
    if not rehearsal.layers or not apart <= scale:
        raise UserError(REFUSED.format(lm.config.model_type))
