"""Rows under rules, step by step until all are full."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xdlm.models import Denoiser
from xdlm.models.contract import in_eval_mode
from xdlm.noise import NoiseProcess
from xdlm.sampling.batching import Batcher
from xdlm.sampling.constraints import Rules
from xdlm.sampling.result import Sample
from xdlm.sampling.rows import Row
from xdlm.sampling.waves import alike, make_row, wave_of
from xdlm.sampling.writing import BATCH_TOKENS, Config, join_trajectories

#: Rows that go through the model at once: with patterns the rest of the work is on the CPU.
_BATCH = 16


@torch.no_grad()
@in_eval_mode
def fill(
    denoiser: Denoiser,
    process: NoiseProcess,
    ids: Sequence[int | None],
    *,
    n: int,
    config: Config,
    rules: Rules,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    batch_tokens: int = BATCH_TOKENS,
    record: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """The same row with its holes (None) filled under rules, `n` times: each a pure function of (seed, its
    number). So many as have `batch_tokens` are under way together."""
    size = max(batch_tokens // max(len(ids), 1), 1)
    batcher = Batcher(denoiser, process, max_batch=min(n, size, _BATCH))
    parts: list[Sample] = []
    for start in range(0, n, size):
        rows = [
            make_row(
                process, ids, config, seed=seed, index=number, stop_ids=stop_ids,
                device=batcher.device, rules=rules, record=record,
            )
            for number in range(start, min(start + size, n))
        ]  # fmt: skip
        while not all(row.done for row in rows):
            _turn([row for row in rows if not row.done], batcher)
            if on_step is not None:
                share = sum(row.step for row in rows) / sum(row.steps for row in rows)
                on_step(int(1000 * (start + share * len(rows))), 1000 * n)
        parts.append(_sample(rows, batcher.head_rows - sum(part.head_rows for part in parts)))
    return parts


def _sample(rows: Sequence[Row], head_rows: int) -> Sample:
    paths = [path for row in rows if (path := row.trajectory()) is not None]
    return Sample(
        torch.stack([row.z for row in rows]),
        torch.tensor([row.nfe for row in rows]),
        head_rows,
        join_trajectories(paths) if paths else None,
        torch.tensor([row.end for row in rows]),
    )


def _turn(rows: Sequence[Row], batcher: Batcher) -> None:
    """One step of every row."""
    waves = [wave_of(group) for group in alike(rows)]
    for wave in waves:
        wave.settle()
    waves = [wave for wave in waves if wave.rows]
    answers = batcher.answer([wave.ask() for wave in waves]) if waves else []
    for wave, found in zip(waves, answers, strict=True):
        wave.tell(*found)
