"""The nats of many texts at once: cut into windows, sorted by length, padded on the right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Score(NamedTuple):
    """Nats of a text under a judge, and over how many of the judge's tokens."""

    nats: float
    tokens: int


#: Told how much is done of how much there is.
OnText = Callable[[int, int], None]


class _Window(NamedTuple):
    text: int
    ids: Sequence[int]


@torch.no_grad()
def score_tokens(
    texts: Sequence[Sequence[int]],
    nats_of: Callable[[Tensor], Tensor],
    *,
    context: int,
    at_once: int,
    device: torch.device,
    on_text: OnText | None = None,
) -> list[Score]:
    """Scores of texts, given as token ids: all tokens after the first, in windows of `context` tokens, if a
    text is longer, each of which begins with the last token of the one before.

    `nats_of` gives `-log p(x_i | x_1 .. x_(i-1))` [B, L - 1] for tokens [B, L], of which there are about
    `at_once` at most. It must be causal: what a text is padded with then changes nothing.
    """
    windows = [window for i, ids in enumerate(texts) for window in _windows(i, ids, context)]
    windows.sort(key=lambda window: len(window.ids), reverse=True)
    nats, counts, done = [0.0] * len(texts), [0] * len(texts), 0
    for batch in _batches(windows, at_once):
        tokens = _padded(batch).to(device)
        lengths = torch.tensor([len(window.ids) for window in batch], device=device)
        counted = torch.arange(1, tokens.shape[1], device=device) < lengths[:, None]
        sums = torch.where(counted, nats_of(tokens).double(), 0.0).sum(1)
        for window, total in zip(batch, sums.tolist(), strict=True):
            nats[window.text] += total
            counts[window.text] += len(window.ids) - 1
        done += len(batch)
        if on_text is not None:
            on_text(done, len(windows))
    return [Score(*each) for each in zip(nats, counts, strict=True)]


def _windows(text: int, ids: Sequence[int], context: int) -> Iterator[_Window]:
    for start in range(0, max(len(ids) - 1, 0), context - 1):
        yield _Window(text, ids[start : start + context])


def _batches(windows: Sequence[_Window], at_once: int) -> Iterator[Sequence[_Window]]:
    """Neighbours, as many as fit beside the longest of them, which is the first; at least one."""
    start = 0
    while start < len(windows):
        stop = start + max(1, at_once // len(windows[start].ids))
        yield windows[start:stop]
        start = stop


def _padded(batch: Sequence[_Window]) -> Tensor:
    """With the last token of each once more, and again: no token has to be set apart for it."""
    longest = len(batch[0].ids)
    return torch.tensor([[*ids, *[ids[-1]] * (longest - len(ids))] for _, ids in batch])
