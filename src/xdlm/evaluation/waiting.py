"""What reading data costs a step of training: its time with the loader and with a batch held in memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from xdlm.training.loader import Held, StepBatches
from xdlm.training.trainer import Trainer

#: Steps before timing starts in each round, in which the loader gets ahead.
_WARMUP = 3


@dataclass(frozen=True)
class LoaderCost:
    """Seconds of a step, the medians over rounds, and the share of them spent waiting for data."""

    with_loader: float
    held: float
    data_wait: float

    @property
    def ratio(self) -> float:
        return self.with_loader / self.held


def measure_loader(
    trainer: Trainer,
    *,
    steps: int,
    rounds: int = 5,
    on_round: Callable[[int, int], None] | None = None,
) -> LoaderCost:
    """Rounds of real steps, by turns with rows as training reads them and with the batch of one step kept
    on the device, so that a machine that slows down slows both. `on_round` hears how many are done, of
    either kind, and of how many."""
    loader = trainer.loader
    held = Held(loader, trainer.step)
    seconds: dict[StepBatches, list[float]] = {loader: [], held: []}
    waits = []
    for done, source in enumerate(rounds * [loader, held], start=1):
        trainer.loader = source
        taken, wait = _round(trainer, steps)
        seconds[source].append(taken / steps)
        if source is loader:
            waits.append(wait)
        if on_round is not None:
            on_round(done, 2 * rounds)
    trainer.loader = loader
    return LoaderCost(
        statistics.median(seconds[loader]), statistics.median(seconds[held]),
        statistics.median(waits),
    )  # fmt: skip


def _round(trainer: Trainer, steps: int) -> tuple[float, float]:
    """Seconds of some steps, and the share of them spent waiting."""
    first = trainer.step
    with trainer.loader.ahead(range(first, first + _WARMUP + steps)):
        _advance(trainer, _WARMUP)
        trainer.meter.begin(trainer.step)
        began = time.perf_counter()
        _advance(trainer, steps)
        taken = time.perf_counter() - began
        return taken, trainer.meter.read(trainer.step)["data_wait"]


def _advance(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.take_step()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
