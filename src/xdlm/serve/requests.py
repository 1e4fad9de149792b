"""What is asked of an engine, how it is going, and what comes of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from xdlm.noise import NoiseProcess
from xdlm.sampling import Trajectory
from xdlm.sampling.constraints import Rules
from xdlm.sampling.writing import Config


class Overloaded(Exception):
    """The queue is full; `retry_after` is a guess, in seconds, when there will be room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many requests are waiting; try again in {retry_after} s")
        self.retry_after = retry_after


class Closed(Exception):
    """The engine takes no new requests."""


class Progress(NamedTuple):
    """A row before its first step or after one: its number within the request, steps done and in all, its
    tokens [L] (the engine's own: do not write to it), the diffusion time, and what the model thought of the
    tokens that the step wrote (not a number elsewhere)."""

    number: int
    step: int
    steps: int
    z: Tensor
    time: float
    probs: Tensor


class Written(NamedTuple):
    """A finished row: its tokens [L], where the text ends in it (its length if nothing ended it), and the
    forward passes that it went through."""

    tokens: Tensor
    end: int
    nfe: int
    trajectory: Trajectory | None


@dataclass(frozen=True)
class Request:
    """`n` rows with the holes (None) of `ids` filled, row i a pure function of (seed, i)."""

    ids: Sequence[int | None]
    config: Config
    n: int = 1
    seed: int = 0
    stop_ids: Sequence[int] = ()
    timeout: float | None = None
    """Seconds until it is given up; None waits as long as it takes."""
    since: float | None = None
    """When (`time.monotonic`) its clock began; None for when it is submitted."""
    process: NoiseProcess | None = None
    """The noise to undo, over the engine's own vocabulary; None for the engine's own."""
    rules: Rules = field(default_factory=Rules)
    """What may be written."""
    record: bool = False
    """Keep the trajectories."""
    on_step: Callable[[Progress], None] | None = None
    """Called in the engine's thread before the first step of each row and after every one: it must be
    quick. If it raises, the request fails with that."""


class Ticket:
    """A request that was accepted."""

    def __init__(self, request: Request, counts: Counter[str]) -> None:
        self.request, self._counts = request, counts
        self.began = time.monotonic() if request.since is None else request.since
        self._future: Future[list[Written]] = Future()
        self._found: dict[int, Written] = {}

    def result(self, timeout: float | None = None) -> list[Written]:
        """The rows, in order. Raises `TimeoutError` when the request's time (or this call's) is over,
        `CancelledError` when it was cancelled, and whatever made it fail."""
        return self._future.result(timeout)

    def cancel(self) -> None:
        """Nobody waits for this any more; it is gone before the next step."""
        self._future.cancel()

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def cancelled(self) -> bool:
        return self._future.cancelled()

    def on_done(self, call: Callable[[Ticket], None]) -> None:
        """Called once, when there is a result or none will come."""
        self._future.add_done_callback(lambda _: call(self))

    # -- for the engine --------------------------------------------------------------------------

    def expired(self, now: float) -> bool:
        timeout = self.request.timeout
        return timeout is not None and now - self.began >= timeout

    def fail(self, error: BaseException, outcome: str) -> None:
        """End it, unless it is over already. It is counted first: who waits may look at once."""
        if not self._future.done() and self._future.set_running_or_notify_cancel():
            self._counts[outcome] += 1
            self._future.set_exception(error)

    def finish(self, number: int, written: Written) -> None:
        """One more row; the last one ends it."""
        self._found[number] = written
        if len(self._found) < self.request.n or self._future.done():
            return
        if self._future.set_running_or_notify_cancel():
            self._counts["finished"] += 1
            self._future.set_result([self._found[i] for i in range(self.request.n)])
