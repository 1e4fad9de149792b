"""The engine: the same tokens whatever else is in the batch, and a proper end for every request."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from xdlm import UserError
from xdlm.api import Model, load
from xdlm.sampling import configure
from xdlm.sampling.batching import Batcher
from xdlm.serve.engine import Engine, Limits
from xdlm.serve.requests import Closed, Overloaded, Progress, Request, Written

KINDS = ("pocket-mdlm", "pocket-xdlm", "pocket-udlm")


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {name: load(name, device="cpu") for name in KINDS}


@pytest.fixture
def pocket(models: dict[str, Model]) -> Model:
    return models["pocket-xdlm"]


@pytest.fixture
def engine(pocket: Model) -> Iterator[Engine]:
    with engine_of(pocket) as engine:
        yield engine


def engine_of(model: Model, **args: Any) -> Engine:
    assert model.process is not None
    return Engine(model.denoiser, model.process, **args)


def request(model: Model, prompt: str = "", new: int = 12, **args: Any) -> Request:
    assert model.process is not None
    own = ("n", "seed", "stop_ids", "timeout", "record", "on_step")
    kept = {name: args.pop(name) for name in own if name in args}
    config = configure({"steps": 6, **args}, model.process)
    return Request([*model.tokenizer.encode(prompt), *[None] * new], config, **kept)


SETTINGS: list[dict[str, Any]] = [
    {"steps": 5},
    {"steps": 9, "temperature": 0.7, "top_p": 0.9},
    {"steps": 4, "last": "argmax"},
]
BY_CONFIDENCE: list[dict[str, Any]] = [
    {"sampler": "confidence", "steps": 8, "block_length": 6},
    {"sampler": "confidence", "prompt": "It was", "guidance": 1.5, "temperature": 0.0},
    {"sampler": "confidence", "confidence": "random"},
]


@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens_as_the_samplers(models: dict[str, Model], kind: str) -> None:
    """Row by row what `Model.sample` draws: same random numbers, same formulas."""
    model = models[kind]
    settings = SETTINGS + (BY_CONFIDENCE if kind != "pocket-udlm" else [])
    with engine_of(model) as engine:
        for how in settings:
            ticket = engine.submit(request(model, seed=3, n=2, record=True, **how))
            how = {"prompt": "", **how}
            how.setdefault("steps", 6)
            expected = model.sample(2, new_tokens=12, seed=3, **how)
            for row, written in enumerate(ticket.result(60)):
                assert torch.equal(written.tokens, expected.tokens[row]), how
                assert written.trajectory is not None and expected.trajectory is not None
                theirs = expected.trajectory.only(row)
                assert torch.equal(written.trajectory.frames, theirs.frames)
                assert written.trajectory.times == pytest.approx(theirs.times)
                moved = theirs.changes() > 0
                mine = written.trajectory.probs
                assert mine is not None and theirs.probs is not None
                assert torch.allclose(mine[moved], theirs.probs[moved], atol=1e-5, equal_nan=True)
            assert max(w.nfe for w in ticket.result(0)) == expected.nfe


@pytest.mark.parametrize("kind", KINDS)
def test_same_tokens_whatever_else_is_in_the_batch(models: dict[str, Model], kind: str) -> None:
    """Alone; in a crowd of other lengths, samplers and settings; and joining while others run."""
    model = models[kind]
    settings = SETTINGS + (BY_CONFIDENCE if kind != "pocket-udlm" else [])
    alone = []
    for how in settings:
        with engine_of(model) as engine:
            alone.append(engine.submit(request(model, seed=11, n=2, record=True, **how)).result(60))

    started = threading.Event()

    def others(engine: Engine) -> None:
        for i in range(4):
            watch = {"on_step": lambda progress: started.set()}
            engine.submit(request(model, "And so", 10 + i % 2, seed=i, steps=12 + i, n=2, **watch))

    with engine_of(model, max_batch=8) as engine:
        others(engine)
        assert started.wait(60)
        tickets = [
            engine.submit(request(model, seed=11, n=2, record=True, **how)) for how in settings
        ]
        others(engine)
        for ticket, expected in zip(tickets, alone, strict=True):
            for mine, theirs in zip(ticket.result(60), expected, strict=True):
                assert torch.equal(mine.tokens, theirs.tokens)
                assert mine.trajectory is not None and theirs.trajectory is not None
                # Probabilities too: not nearly the same, but the same bits.
                assert torch.equal(
                    mine.trajectory.probs.nan_to_num(-1), theirs.trajectory.probs.nan_to_num(-1)
                )


def test_rounding_never_reaches_the_rows(pocket: Model, monkeypatch) -> None:
    """A trunk whose rounding depends on the size of the batch: one size is kept to. On a GPU it is the
    largest, unless rounding depends on the lane as well."""
    assert pocket.process is not None
    trunk = type(pocket.denoiser).trunk

    def by_size(self, z, t, label=None):
        return trunk(self, z, t, label) * (1 + len(z) * 1e-6)

    def by_lane(self, z, t, label=None):
        return by_size(self, z, t, label) * (1 + 1e-6 * torch.arange(len(z))[:, None, None])

    own = Batcher(pocket.denoiser, pocket.process, max_batch=4)
    with torch.no_grad():
        assert own.size_for(12, 1) == 1
        for pretend, measure, size in ((by_size, 1, 1), (by_size, 4, 4), (by_lane, 4, 1)):
            monkeypatch.setattr(type(pocket.denoiser), "trunk", pretend)
            batcher = Batcher(pocket.denoiser, pocket.process, max_batch=4)
            if measure == 4:  # as on a GPU
                lanes_agree = batcher._try(12, 4, 4)
                monkeypatch.setattr(batcher, "_measure", lambda _, ok=lanes_agree: 4 if ok else 1)
            assert [batcher.size_for(12, n) for n in (1, 2, 3, 9)] == [size] * 4
            z = torch.randint(2000, (3, 12))
            t = torch.tensor([0.5])
            together = batcher._hidden([(z, t.expand(3))])[0]
            for row, hidden in zip(z, together, strict=True):
                assert torch.equal(batcher._hidden([(row[None], t)])[0][0], hidden)
            assert batcher.rows_filled_up == (1 + 9 if size == 4 else 0)


def test_rows_are_run_together(pocket: Model) -> None:
    """Sixteen requests at once take about as many turns as one, not sixteen times as many."""
    with engine_of(pocket) as engine:
        tickets = [engine.submit(request(pocket, seed=i, steps=8)) for i in range(16)]
        for ticket in tickets:
            ticket.result(60)
        assert engine.counts["turns"] <= 30
        assert engine.counts["finished"] == engine.counts["accepted"] == 16
        assert (engine.waiting, engine.active) == (0, 0)


def test_progress_tells_every_step(pocket: Model, engine: Engine) -> None:
    seen: list[tuple[int, int, int]] = []
    last: dict[int, torch.Tensor] = {}

    def watch(progress: Progress) -> None:
        seen.append((progress.number, progress.step, progress.steps))
        last[progress.number] = progress.z

    written = engine.submit(request(pocket, n=2, steps=5, on_step=watch)).result(60)
    for number in range(2):
        assert [s for s in seen if s[0] == number] == [(number, i, 6) for i in range(7)]
        assert torch.equal(last[number], written[number].tokens)


def test_prompt_stays_and_text_ends(pocket: Model, engine: Engine) -> None:
    ids = pocket.tokenizer.encode("The old man")
    stop = tuple(range(0, 2000, 3))  # so many that each text meets one
    for how in ({}, {"sampler": "confidence"}):
        asked = request(pocket, "The old man", 20, stop_ids=stop, **how)
        (written,) = engine.submit(asked).result(60)
        assert written.tokens[: len(ids)].tolist() == ids
        assert len(ids) <= written.end < len(ids) + 20
        assert int(written.tokens[written.end]) in stop
        assert not any(int(i) in stop for i in written.tokens[len(ids) : written.end])


def slow(gate: threading.Event) -> Any:
    """Holds the engine's thread until the gate opens."""
    return lambda progress: gate.wait(60) and None


def test_full_queue_refuses(pocket: Model) -> None:
    gate = threading.Event()
    with engine_of(pocket, limits=Limits(active=1, waiting=2)) as engine:
        first = engine.submit(request(pocket, on_step=slow(gate)))
        while engine.waiting:
            time.sleep(0.01)
        queued = [engine.submit(request(pocket, seed=i)) for i in range(2)]
        for _ in range(1000):
            with pytest.raises(Overloaded) as refused:
                engine.submit(request(pocket))
        assert refused.value.retry_after >= 1
        assert engine.counts["refused"] == 1000 and engine.waiting == 2
        gate.set()
        assert all(len(ticket.result(60)) == 1 for ticket in (first, *queued))
        engine.submit(request(pocket)).result(60)


def test_time_is_up(pocket: Model) -> None:
    """Both for what runs and for what waits; the others go on."""
    gate = threading.Event()
    with engine_of(pocket, limits=Limits(active=1, waiting=4)) as engine:
        runs = engine.submit(request(pocket, timeout=0.2, on_step=slow(gate)))
        waits = engine.submit(request(pocket, timeout=0.2))
        patient = engine.submit(request(pocket))
        time.sleep(0.3)
        gate.set()
        for ticket in (runs, waits):
            with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
                ticket.result(60)
        assert len(patient.result(60)) == 1
        assert (engine.counts["timed_out"], engine.counts["finished"]) == (2, 1)


def test_cancelled_requests_leave(pocket: Model, engine: Engine) -> None:
    began = threading.Event()
    steps: list[int] = []

    def watch(progress: Progress) -> None:
        steps.append(progress.step)
        began.set()

    ticket = engine.submit(request(pocket, new=64, steps=5000, on_step=watch))
    assert began.wait(60)
    ticket.cancel()
    with pytest.raises(CancelledError):
        ticket.result(60)
    engine.submit(request(pocket)).result(60)
    assert max(steps) < 4000 and engine.active == 0
    assert engine.counts["cancelled"] == 1


def test_one_requests_trouble_is_its_own(pocket: Model, monkeypatch) -> None:
    """A callback that raises, and a model that fails for one row of a batch."""

    def bad(progress: Progress) -> None:
        raise RuntimeError("no ear")

    trunk = type(pocket.denoiser).trunk
    poison = 77

    def picky(self, z, t, label=None):
        if (z[:, 0] == poison).any():
            raise RuntimeError("out of memory")
        return trunk(self, z, t, label)

    monkeypatch.setattr(type(pocket.denoiser), "trunk", picky)
    with engine_of(pocket) as engine:
        engine.batcher._agreed.update({(13, size): True for size in engine.batcher.sizes})
        deaf = engine.submit(request(pocket, on_step=bad))
        config = request(pocket).config
        sick = engine.submit(Request([poison, *[None] * 12], config))
        well = [engine.submit(Request([5, *[None] * 12], config, seed=i)) for i in range(2)]
        with pytest.raises(RuntimeError, match="no ear"):
            deaf.result(60)
        with pytest.raises(RuntimeError, match="out of memory"):
            sick.result(60)
        assert all(isinstance(t.result(60)[0], Written) for t in well)
        assert engine.alive and engine.counts["failed"] == 2


def test_draining_finishes_what_was_begun(pocket: Model) -> None:
    engine = engine_of(pocket, limits=Limits(active=2, waiting=8))
    tickets = [engine.submit(request(pocket, seed=i)) for i in range(5)]
    assert engine.close(timeout=60)
    assert all(len(ticket.result(0)) == 1 for ticket in tickets)
    with pytest.raises(Closed):
        engine.submit(request(pocket))
    engine = engine_of(pocket)
    ticket = engine.submit(request(pocket, new=64, steps=5000))
    assert not engine.close(timeout=0.1), "not finished by then"
    with pytest.raises((CancelledError, Closed)):
        ticket.result(0)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"n": 0}, "n must lie in"),
        ({"seed": -1}, "seed must lie in"),
        ({"stop_ids": (2048,)}, "no token of a text"),
        ({"timeout": 0.0}, "timeout must be positive"),
        ({"new": 0, "prompt": "a"}, "no position to fill"),
        ({"sampler": "confidence", "refresh": 4}, "leave it out"),
        ({"sampler": "confidence", "guidance": 2.0}, "needs a prompt"),
        ({"sampler": "confidence", "steps": 1, "block_length": 2}, "cannot fill"),
        ({"impl": "dense"}, "thinned"),
    ],
)
def test_bad_requests_are_refused_at_once(pocket: Model, engine: Engine, args, says) -> None:
    with pytest.raises(UserError, match=says):
        engine.submit(request(pocket, **args))
    assert engine.counts["accepted"] == 0


def test_other_work_between_turns(pocket: Model, engine: Engine) -> None:
    """It is done in the engine's thread while a request runs, and its errors are its own."""
    ticket = engine.submit(request(pocket, steps=40))

    def work(pieces: int, divisor: int = 1) -> Generator[None, None, str]:
        for _ in range(pieces):
            assert 1 // divisor
            yield
        return threading.current_thread().name

    assert engine.call(work(0)).result(60) == "xdlm-engine"
    with pytest.raises(ZeroDivisionError):
        engine.call(work(1, 0)).result(60)
    assert len(ticket.result(60)) == 1
    before = engine.counts["turns"]
    assert engine.call(work(5)).result(60) and engine.counts["turns"] >= before + 5
    endless = engine.call(work(10**9))
    short = engine.call(work(5))
    assert short.result(60) and not endless.done(), "by turns"
    assert endless.cancel(), "also when it has begun"


def test_noise_of_ones_own(pocket: Model, engine: Engine) -> None:
    """A request may undo other noise than the engine's, as `Model.mixed` does."""
    other = pocket.mixed(0.9)
    assert other.process is not None
    config = configure({"steps": 6}, other.process)
    asked = Request([None] * 12, config, seed=2, process=other.process)
    expected = other.sample(1, length=12, steps=6, seed=2)
    assert torch.equal(engine.submit(asked).result(60)[0].tokens, expected.tokens[0])
