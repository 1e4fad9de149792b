"""The model's answers to many rows at once, each the same to the last bit whatever the others are.

A floating-point sum depends on its order, and the order on the shape of the tensors: a row may come out
differently in a batch of 3 than alone, and so may a token. Two rules prevent that. The head runs on blocks
of one fixed number of rows. The trunk runs on batches of sizes that were tried and found to give equal
bits: on many CPUs all of them, on a GPU perhaps one, to which smaller batches are filled up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.models import Denoiser, run_trunk
from xdlm.noise import NoiseProcess
from xdlm.sampling.predictions import Prediction
from xdlm.sampling.rows import Ask, HeadKey
from xdlm.sampling.waves import Head, make_head

#: Rows of a block that goes through the head; small, since fewer rows are filled up to it.
HEAD_ROWS = 32
#: Heads that are remembered; each is a few references.
_MAX_HEADS = 256


class Batcher:
    """Answers asks about rows of any lengths; rows of one length go through the trunk together."""

    def __init__(self, denoiser: Denoiser, process: NoiseProcess, *, max_batch: int = 16) -> None:
        if max_batch < 1:
            raise UserError(f"max_batch must be at least 1, got {max_batch}")
        self.denoiser, self.process, self.max_batch = denoiser, process, max_batch
        self.device = denoiser.device
        self.sizes = _halves(max_batch)
        self._agreed: dict[tuple[int, int], bool] = {}
        self._lanes_agree: dict[int, bool] = {}
        self._heads: dict[HeadKey, Head] = {}
        #: Rows that went through the trunk, those that filled up a batch, and positions through the head.
        self.rows_run = self.rows_filled_up = self.head_rows = 0

    @torch.no_grad()
    def answer(self, asks: Sequence[Ask]) -> list[tuple[Prediction, Tensor | None]]:
        """For each ask, in their order, a prediction and the whole laws that were asked for."""
        hidden = self._hidden([(ask.z, ask.t) for ask in asks])
        unseen = {i: (ask.blind, ask.t) for i, ask in enumerate(asks) if ask.blind is not None}
        blind = dict(zip(unseen, self._hidden(list(unseen.values())), strict=True))
        found: dict[int, Prediction] = {}
        for key in dict.fromkeys(ask.head for ask in asks):
            same = [i for i, ask in enumerate(asks) if ask.head == key]
            rows = [(asks[i], hidden[i], blind.get(i)) for i in same]
            found.update(zip(same, self._predict(key, rows), strict=True))
        return [(found[i], self._law(ask, hidden[i], blind.get(i))) for i, ask in enumerate(asks)]

    def size_for(self, length: int, n: int) -> int:
        """How many rows go through the trunk at once, of n that wait: the smallest batch that takes them
        all, or the largest there is, among those that give equal bits."""
        enough = [size for size in self.sizes if size >= n]
        too_few = [size for size in reversed(self.sizes) if size < n]
        return next(size for size in (*enough, *too_few) if self._agrees(length, size))

    def _hidden(self, waves: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Hidden states [B, L, d] of tokens [B, L] with their times [B]; one length goes together."""
        found: dict[int, Tensor] = {}
        for length in dict.fromkeys(z.shape[1] for z, _ in waves):
            same = [i for i, (z, _) in enumerate(waves) if z.shape[1] == length]
            z, t = (torch.cat(parts) for parts in zip(*(waves[i] for i in same), strict=True))
            split = self._run(z, t).split([len(waves[i][0]) for i in same])
            found.update(zip(same, split, strict=True))
        return [found[i] for i in range(len(waves))]

    def _run(self, z: Tensor, t: Tensor) -> Tensor:
        parts, start = [], 0
        while (left := len(z) - start) > 0:
            size = self.size_for(z.shape[1], left)
            lanes = torch.arange(start, start + size, device=self.device).clamp_max(len(z) - 1)
            hidden = run_trunk(self.denoiser, z[lanes], t[lanes])
            parts.append(hidden[:left].clone())  # the next call may overwrite it
            self.rows_run += min(size, left)
            self.rows_filled_up += max(size - left, 0)
            start += size
        return torch.cat(parts)

    def _predict(
        self, key: HeadKey, waves: Sequence[tuple[Ask, Tensor, Tensor | None]]
    ) -> list[Prediction]:
        head = self._head(key)
        hidden = torch.cat([h[ask.places] for ask, h, _ in waves])
        unseen = [b[ask.places] for ask, _, b in waves if b is not None]
        blind = torch.cat(unseen) if unseen else None
        uniform = torch.cat([ask.uniform for ask, _, _ in waves])
        present = torch.cat([ask.z[ask.places] for ask, _, _ in waves])
        parts = []
        for at in self._blocks(len(hidden)):
            parts.append(
                head(hidden[at], None if blind is None else blind[at], uniform[at], present[at])
            )
        whole = Prediction(*map(torch.cat, zip(*parts, strict=True)))
        counts = [len(ask.uniform) for ask, _, _ in waves]
        self.head_rows += sum(counts)
        split = [field[: sum(counts)].split(counts) for field in whole]
        return [Prediction(*fields) for fields in zip(*split, strict=True)]

    def _law(self, ask: Ask, hidden: Tensor, blind: Tensor | None) -> Tensor | None:
        if ask.law_at is None:
            return None
        rows, unseen = hidden[ask.law_at], None if blind is None else blind[ask.law_at]
        head = self._head(ask.head)
        parts = [
            head.law(rows[at], None if unseen is None else unseen[at])
            for at in self._blocks(len(rows))
        ]
        return torch.cat(parts)[: len(rows)]

    def _blocks(self, n: int) -> Iterator[Tensor]:
        """Indices of so many rows, a fixed number at a time; the last block is filled up."""
        for start in range(0, n, HEAD_ROWS):
            yield torch.arange(start, start + HEAD_ROWS, device=self.device).clamp_max(n - 1)

    def _head(self, key: HeadKey) -> Head:
        if key not in self._heads:
            while len(self._heads) >= _MAX_HEADS:
                del self._heads[next(iter(self._heads))]
            self._heads[key] = make_head(self.denoiser, self.process, key)
        return self._heads[key]

    def _agrees(self, length: int, size: int) -> bool:
        """Whether rows of a batch of this size come out as in one of the size that all are compared with,
        in whatever lane they lie. Tried once, when such a batch is first wanted."""
        if (length, size) not in self._agreed:
            self._agreed[length, size] = self._try(length, size, self._measure(length))
        return self._agreed[length, size]

    def _measure(self, length: int) -> int:
        """One row alone on a CPU. On a GPU, where that hardly ever agrees with anything, the largest batch,
        to which others are then filled up; unless it does not even agree with itself."""
        if self.device.type == "cpu":
            return 1
        if length not in self._lanes_agree:
            self._lanes_agree[length] = self._try(length, self.max_batch, self.max_batch)
        return self.max_batch if self._lanes_agree[length] else 1

    def _try(self, length: int, size: int, measure: int) -> bool:
        pick, n = torch.Generator().manual_seed(length), max(size, measure)
        z = torch.randint(self.process.vocab.size, (n, length), generator=pick).to(self.device)
        t = torch.rand(n, generator=pick).to(self.device)
        chunks = zip(z.split(measure), t.split(measure), strict=True)
        expected = torch.cat([run_trunk(self.denoiser, *chunk).clone() for chunk in chunks])
        order = torch.randperm(n, generator=pick).to(self.device)[:size]
        return all(
            torch.equal(run_trunk(self.denoiser, z[lanes], t[lanes]), expected[lanes])
            for lanes in (order, order.roll(1))[: 2 if size > 1 else 1]
        )


def _halves(largest: int) -> list[int]:
    """A number, its half, and so on down to 1; the smallest first."""
    sizes = [largest]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes[::-1]
