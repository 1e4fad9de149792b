"""Rows that are read ahead: the same, in time, and without a thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from xdlm.config import DataConfig, ProcessConfig, RunConfig, TrainConfig
from xdlm.data import Ahead, Rows, TokensInMemory
from xdlm.evaluation.waiting import measure_loader
from xdlm.models import DiT, DiTConfig
from xdlm.structs import Batch
from xdlm.tokens import TextTokenizer
from xdlm.training.loader import Held, Loader
from xdlm.training.meter import Meter
from xdlm.training.trainer import Trainer

CPU = torch.device("cpu")


def some_rows(n: int = 11, length: int = 4) -> Rows:
    tokens = np.arange(n * length, dtype=np.uint16)
    return Rows(TokensInMemory(tokens, n_characters=1, n_documents=1), length)


def loader(rows: Rows | None = None, *, share: slice = slice(0, 6), micro_batch: int = 4) -> Loader:
    rows = some_rows() if rows is None else rows
    return Loader(rows, seed=3, batch=6, share=share, micro_batch=micro_batch, device=CPU)


def flat(batches: Iterator[tuple[Batch, bool]]) -> list[list[int]]:
    return [[last, *b.index.tolist(), *b.tokens.flatten().tolist()] for b, last in batches]


def test_read_ahead_or_not_the_batches_are_the_same() -> None:
    steps = range(2, 9)  # over the end of an epoch
    expected = [flat(loader().batches(step)) for step in steps]
    ahead = loader()
    with ahead.ahead(steps):
        assert [flat(ahead.batches(step)) for step in steps] == expected
    assert flat(ahead.batches(2)) == expected[0]  # and without the thread again


def test_shares_of_processes_make_up_the_batch() -> None:
    parts = [loader(share=slice(0, 3)), loader(share=slice(3, 6))]
    halves = [batch for part in parts for batch, _ in part.batches(5)]
    ((whole, last),) = loader(micro_batch=6).batches(5)
    assert last and [last for _, last in loader().batches(5)] == [False, True]
    assert torch.cat([b.tokens for b in halves]).equal(whole.tokens)
    assert torch.cat([b.index for b in halves]).equal(whole.index)


def test_an_error_of_the_source_comes_where_its_item_would_have() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("the disk is gone")

    with Ahead(items(), depth=1) as ahead:
        assert next(ahead) == 1
        assert next(ahead) == 2
        for _ in range(2):  # whoever asks again is told again
            with pytest.raises(OSError, match="the disk is gone"):
                next(ahead)
    with Ahead([1, 2]) as ahead:
        assert list(ahead) == [1, 2]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_no_thread_is_left_behind(error: type[BaseException] | None) -> None:
    before = threading.active_count()
    endless = iter(int, 1)
    try:
        with Ahead(endless, depth=2) as ahead:
            next(ahead)
            assert threading.active_count() == before + 1
            if error is not None:
                raise error
    except (KeyboardInterrupt, RuntimeError):
        pass
    assert threading.active_count() == before


def test_a_thread_reads_only_so_far_ahead() -> None:
    read: list[int] = []
    with Ahead((read.append(i) or i for i in range(100)), depth=3) as ahead:
        next(ahead)
        time.sleep(0.1)
        assert len(read) <= 1 + 3 + 1  # taken, in the queue, and in the thread's hand


class SlowTokens(TokensInMemory):
    """A disk that takes its time."""

    def read(self, start: int, stop: int) -> np.ndarray:
        time.sleep(0.02)
        return super().read(start, stop)


def test_the_next_step_is_read_while_one_computes(monkeypatch) -> None:
    """Whoever computes waits until the next step's rows have been read: without a thread, for ever."""
    steps = 6
    done = [threading.Event() for _ in range(steps + 1)]
    done[steps].set()
    read = Loader._read

    def noted(self: Loader, step: int) -> object:
        found = read(self, step)
        done[step].set()
        return found

    monkeypatch.setattr(Loader, "_read", noted)
    source = loader()
    with source.ahead(range(steps)):
        for step in range(steps):
            assert list(source.batches(step))
            assert done[step + 1].wait(timeout=20)


def test_waiting_is_counted() -> None:
    meter = Meter(DiT(DiTConfig(1, 8, 2, 4), 50), CPU, torch.float32, batch=6, length=4)
    fast = some_rows()
    slow = loader(Rows(SlowTokens(fast.stream.tokens, 1, 1), fast.length))  # type: ignore[attr-defined]
    meter.begin(0)
    for _ in meter.waiting(slow.batches(0)):
        pass
    assert meter.read(1)["data_wait"] > 0.5
    meter.begin(1)
    for _ in meter.waiting(iter(list(slow.batches(1)))):
        time.sleep(0.02)
    assert meter.read(2)["data_wait"] < 0.2


def test_cost_of_the_loader_is_measured(tmp_path) -> None:
    """A slow source that nothing can hide shows in the ratio; the run goes on as it was."""
    tokenizer = TextTokenizer.train(["a b c"], 300)
    config = RunConfig(
        process=ProcessConfig(kind="masked"),
        model=DiTConfig(depth=1, width=8, heads=2, cond_width=4),
        data=DataConfig(length=4),
        train=TrainConfig(out=str(tmp_path), batch=6, micro_batch=6, device="cpu"),
    )
    tokens = np.arange(60, dtype=np.uint16)
    trainer = Trainer(config, tokenizer, Rows(SlowTokens(tokens, 1, 1), 4))
    own = trainer.loader
    told: list[tuple[int, int]] = []
    cost = measure_loader(trainer, steps=2, rounds=1, on_round=lambda *how: told.append(how))
    assert told == [(1, 2), (2, 2)]
    assert cost.ratio > 1.5 and cost.with_loader > 0.02
    assert 0.2 < cost.data_wait <= 1
    assert trainer.loader is own
    assert not list(tmp_path.iterdir())
    held = Held(own, 0)
    assert flat(held.batches(7)) == flat(held.batches(9)) == flat(own.batches(0))
