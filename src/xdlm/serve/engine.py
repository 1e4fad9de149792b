"""Requests that share a model: they join between two steps, and leave when they are finished.

One thread owns the model. In every turn it lets each active row take one step (`rows`), all of them through
the model together (`batching`). The same seed and settings give the same tokens whatever else is in the
batch. Requests that find no room wait in a bounded queue; one that finds the queue full is refused, one
whose time is over or whose client is gone is dropped before the next turn.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from xdlm.errors import UserError, check_seed
from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.sampling.batching import Batcher
from xdlm.sampling.predictions import Prediction
from xdlm.sampling.rows import Row, Wave
from xdlm.sampling.waves import alike, make_row, wave_of
from xdlm.serve.requests import Closed, Overloaded, Progress, Request, Ticket, Written

T = TypeVar("T")


class Limits(NamedTuple):
    """How many rows run side by side, and how many may wait for that."""

    active: int = 16
    waiting: int = 256


@dataclass
class _Seat:
    """A row that waits or runs."""

    ticket: Ticket
    number: int
    row: Row | None = None
    began: float = 0.0
    finished: bool = False

    @property
    def running(self) -> Row:
        assert self.row is not None, "it was let in"
        return self.row


class Engine:
    """Runs requests until it is closed. Use it as a context, or call `close`."""

    def __init__(
        self,
        denoiser: Denoiser,
        process: NoiseProcess,
        *,
        limits: Limits | None = None,
        max_batch: int = 16,
    ) -> None:
        self.limits = limits if limits is not None else Limits()
        if min(self.limits) < 1:
            raise UserError(f"an engine needs room for rows to run and to wait, got {self.limits}")
        self.process, self.batcher = process, Batcher(denoiser, process, max_batch=max_batch)
        #: What became of requests: accepted, refused, finished, cancelled, timed_out, failed; and turns.
        self.counts: Counter[str] = Counter()
        self._waiting: deque[_Seat] = deque()
        self._calls: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()
        self._active: list[_Seat] = []
        self._changed = threading.Condition()
        self._closing = False
        self._row_seconds = 1.0  # of a row from its first step to its last, lately
        self._thread = threading.Thread(target=self._run, name="xdlm-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(drain=False)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return sum(not seat.finished for seat in self._active)

    @property
    def alive(self) -> bool:
        """Whether requests are taken and answered."""
        return self._thread.is_alive() and not self._closing

    def submit(self, request: Request) -> Ticket:
        """Put a request into the queue. Raises `Overloaded`, `Closed`, or `UserError` where the request
        could not be answered whatever the load."""
        with self._changed:
            self._require_room(request.n)  # the look at the request costs more
        self._check(request)
        with self._changed:
            self._require_room(request.n)
            ticket = Ticket(request, self.counts)
            self._waiting.extend(_Seat(ticket, number) for number in range(request.n))
            self.counts["accepted"] += 1
            self._changed.notify_all()
        return ticket

    def call(self, pieces: Generator[None, None, T]) -> Future[T]:
        """Something else to do with the model, in its thread: a piece between two turns, by turns with
        what others asked for. Cancel what it returns to stop it, also when it has begun."""
        future: Future[T] = Future()
        with self._changed:
            self._require_room(0)
            if len(self._calls) >= self.limits.waiting:
                self.counts["refused"] += 1
                raise Overloaded(self._retry_after())
            self._calls.append((pieces, future))
            self._changed.notify_all()
        return future

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no new requests, finish (or with `drain=False` cancel) those there are, and stop. Whether
        all was done within `timeout` seconds; what was not is cancelled."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if drain:
            self._thread.join(timeout)
        done = not self._thread.is_alive()
        self.give_up()
        self._thread.join()
        return done

    def give_up(self) -> None:
        """Take no new requests and cancel those there are; it stops soon after."""
        with self._changed:
            self._closing = True
            for seat in (*self._waiting, *self._active):
                seat.ticket.cancel()
            for _, future in self._calls:
                future.cancel()
            self._changed.notify_all()

    def _require_room(self, n: int) -> None:
        """For so many more rows."""
        if self._closing or not self._thread.is_alive():
            raise Closed("the engine is shutting down and takes no new requests")
        if n <= self.limits.waiting < len(self._waiting) + n:
            self.counts["refused"] += 1
            raise Overloaded(self._retry_after())

    def _check(self, request: Request) -> None:
        longest = self.limits.waiting
        if not 1 <= request.n <= longest:
            raise UserError(f"n must lie in 1..{longest}, got {request.n}")
        check_seed(request.seed)
        if request.timeout is not None and not request.timeout > 0:
            raise UserError(f"timeout must be positive, got {request.timeout}")
        self._make_row(request, 0)  # what is wrong with its settings shows here

    def _make_row(self, request: Request, number: int) -> Row:
        process = self.process if request.process is None else request.process
        assert process.vocab == self.process.vocab
        return make_row(
            process, request.ids, request.config, seed=request.seed, index=number,
            stop_ids=request.stop_ids, device=self.batcher.device, rules=request.rules,
            record=request.record,
        )  # fmt: skip

    def _retry_after(self) -> int:
        rounds = len(self._waiting) / self.limits.active + 1
        return max(1, math.ceil(rounds * self._row_seconds))

    # -- in the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._admit():
                self._call_one()
                self._turn()
                self.counts["turns"] += 1
        finally:
            # Also where a bug ends the thread: nobody may wait for ever.
            with self._changed:
                self._closing = True
                for seat in (*self._waiting, *self._active):
                    seat.ticket.fail(Closed("the engine stopped"), "failed")
                for _, future in self._calls:
                    future.cancel()
                self._waiting.clear()
                self._active.clear()

    def _admit(self) -> bool:
        """Let rows in, first come first served, once there is something to do; False at the end."""
        with self._changed:
            while not (self._waiting or self._active or self._calls or self._closing):
                self._changed.wait()
            self._drop()
            while self._waiting and len(self._active) < self.limits.active:
                self._active.append(self._waiting.popleft())
            return bool(self._active or self._calls) or not self._closing

    def _call_one(self) -> None:
        if not self._calls:
            return
        pieces, future = self._calls.popleft()
        # It is not marked as running until it is done: so it can be cancelled.
        if future.cancelled():
            return
        try:
            next(pieces)
        except StopIteration as end:
            if future.set_running_or_notify_cancel():
                future.set_result(end.value)
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            with self._changed:
                self._calls.append((pieces, future))

    def _drop(self) -> None:
        """Rows of requests that are over: cancelled, failed, or out of time."""
        now = time.monotonic()
        for ticket in {id(s.ticket): s.ticket for s in (*self._waiting, *self._active)}.values():
            if ticket.expired(now):
                late = TimeoutError(f"not finished within {ticket.request.timeout:g} s")
                ticket.fail(late, "timed_out")
            self.counts["cancelled"] += ticket.cancelled
        self._waiting = deque(seat for seat in self._waiting if not seat.ticket.done)
        self._active = [seat for seat in self._active if not seat.ticket.done]

    @torch.no_grad()
    def _turn(self) -> None:
        """One step of every active row; steps that need nothing of the model are taken on the way."""
        seats: dict[int, _Seat] = {}
        for seat in self._active:
            with self._blamed(seat):
                self._seat(seat)
                seats[id(seat.row)] = seat
        for wave, found in self._answers(self._waves(seats), seats):
            own = [seats[id(row)] for row in wave.rows]
            with self._blamed(*own):
                wave.tell(*found)
                for seat in own:
                    with self._blamed(seat):
                        self._stepped(seat)
        self._active = [seat for seat in self._active if not seat.finished]

    @contextmanager
    def _blamed(self, *seats: _Seat) -> Iterator[None]:
        """Whatever goes wrong with rows is their requests' misfortune, and nobody else's."""
        try:
            yield
        except Exception as error:
            for seat in seats:
                seat.ticket.fail(error, "failed")

    def _seat(self, seat: _Seat) -> None:
        if seat.row is None:
            seat.row = self._make_row(seat.ticket.request, seat.number)
            seat.began = time.monotonic()
            self._tell(seat)

    def _waves(self, seats: Mapping[int, _Seat]) -> list[Wave]:
        """What the rows ask next, those that are alike together; without those that finished on the way."""
        waves, rows = [], [seat.running for seat in seats.values()]
        while rows:
            settled: list[Row] = []
            for group in alike(rows):
                with self._blamed(*(seats[id(row)] for row in group)):
                    wave = wave_of(group)
                    settled += wave.settle()
                    if wave.rows:
                        waves.append(wave)
            rows = []
            for row in settled:
                seat = seats[id(row)]
                with self._blamed(seat):
                    self._stepped(seat)
                    if not row.done:
                        rows.append(row)
        return waves

    def _answers(
        self, waves: Sequence[Wave], seats: Mapping[int, _Seat]
    ) -> Iterator[tuple[Wave, tuple[Prediction, Tensor | None]]]:
        """All at once; where that fails, row by row, so that one row's trouble is not everybody's."""
        if not waves:
            return
        try:
            yield from zip(waves, self.batcher.answer([wave.ask() for wave in waves]), strict=True)
        except Exception:
            for single in (part for wave in waves for part in wave.split()):
                with self._blamed(*(seats[id(row)] for row in single.rows)):
                    yield single, self.batcher.answer([single.ask()])[0]

    def _tell(self, seat: _Seat) -> None:
        """Tell whoever watches where a row is."""
        row, request = seat.running, seat.ticket.request
        if request.on_step is not None and not seat.ticket.done:
            request.on_step(Progress(seat.number, row.step, row.steps, row.z, row.time, row.probs))

    def _stepped(self, seat: _Seat) -> None:
        """A row took a step; hand it over if it was the last."""
        self._tell(seat)
        row = seat.running
        if row.done:
            seat.finished = True
            self._row_seconds += 0.1 * (time.monotonic() - seat.began - self._row_seconds)
            written = Written(row.z.clone(), row.end, row.nfe, row.trajectory())
            seat.ticket.finish(seat.number, written)
