"""Keys and values of the positions outside a block, remembered rather than computed anew.

Attention looks both ways, so every token written in a block changes the states of all other positions,
those of the prompt and of finished blocks too. Remembering them is exact in the first layer only, and an
approximation beyond it (Fast-dLLM's dual cache), until they are computed anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.models import Denoiser


class Memory:
    """Keys and values [B, heads, L, d] of each layer, computed anew every `refresh` passes."""

    def __init__(self, denoiser: Denoiser, refresh: int) -> None:
        self.denoiser, self.refresh = denoiser, refresh
        self.forget()

    def forget(self) -> None:
        self._age = 0
        self._layers: list[tuple[Tensor, Tensor]] = []

    def hidden(self, z: Tensor, t: Tensor, rows: Tensor, span: slice) -> Tensor:
        """Hidden states of the positions `span` of `z` [B, L], the others being as they were when last
        computed. `rows` [B] numbers the rows, in order; from pass to pass they only become fewer."""
        if self._age % self.refresh == 0:
            self.forget()
            found = self.denoiser.trunk_at(z, t, 0, self._remember)[:, span]
        else:
            self._keep(rows)
            start = max(span.start - self.denoiser.lag, 0)
            self._span = slice(start, span.stop)
            found = self.denoiser.trunk_at(z[:, self._span], t, start, self._recall)
            found = found[:, span.start - start :]
        self._rows = rows
        self._age += 1
        return found

    def _remember(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert layer == len(self._layers)
        self._layers.append((k, v))
        return k, v

    def _recall(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values of all positions, the stretch's own in their places."""
        old_k, old_v = self._layers[layer]
        return self._around(old_k, k), self._around(old_v, v)

    def _around(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.cat([old[:, :, : self._span.start], new, old[:, :, self._span.stop :]], dim=2)

    def _keep(self, rows: Tensor) -> None:
        """What belongs to these rows."""
        if len(rows) < len(self._rows):
            at = torch.isin(self._rows, rows).nonzero()[:, 0]
            self._layers = [(k[at], v[at]) for k, v in self._layers]
