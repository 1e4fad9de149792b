"""From the engine's thread to a client: waiting that notices when the client goes, and events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from xdlm.serve.requests import Progress, Ticket, Written

T = TypeVar("T")
#: Seconds between two looks at whether the client is still there.
_LOOK = 0.25


class Clock:
    """Of a request, from its arrival."""

    def __init__(self, timeout: float) -> None:
        self.began, self.timeout = time.monotonic(), timeout

    @property
    def left(self) -> float:
        """Seconds until it is given up."""
        return self.began + self.timeout - time.monotonic()


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def finished(tickets: Sequence[Ticket], http: HttpRequest) -> list[list[Written]]:
    """The results of some tickets; all are cancelled if the client goes away or one fails."""
    loop = asyncio.get_running_loop()
    done = [loop.create_future() for _ in tickets]

    def settle(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    for ticket, future in zip(tickets, done, strict=True):
        ticket.on_done(lambda _, f=future: _tell(loop, settle, f))  # type: ignore[misc]
    try:
        waiting = set(done)
        while waiting:
            over, waiting = await asyncio.wait(
                waiting, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED
            )
            for future in over:
                tickets[done.index(future)].result(0)  # raises what made it fail
            if waiting and await http.is_disconnected():
                raise ClientGone
        return [ticket.result(0) for ticket in tickets]
    finally:
        for ticket in tickets:
            ticket.cancel()


async def awaited(future: Future[T], http: HttpRequest, clock: Clock) -> T:
    """The result of some other work; it is cancelled if the client goes away or the time is up."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: _tell(loop, done.set))
    try:
        while not future.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), min(_LOOK, max(clock.left, 0.0)))
            if not future.done() and clock.left <= 0:
                raise TimeoutError(f"not finished within {clock.timeout:g} s")
            if not future.done() and await http.is_disconnected():
                raise ClientGone
        return future.result(0)
    finally:
        future.cancel()


class Steps:
    """Progress on its way from the engine's thread into an event loop, in order."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[tuple[int, Progress | Ticket]] = asyncio.Queue()

    def watcher(self, number: int) -> Callable[[Progress], None]:
        return lambda progress: _tell(self.loop, self.queue.put_nowait, (number, progress))

    def end(self, number: int, ticket: Ticket) -> None:
        ticket.on_done(lambda t: _tell(self.loop, self.queue.put_nowait, (number, t)))

    async def all(self, tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Progress | Ticket]]:
        """Every step of every ticket, and each ticket when it is done."""
        left = len(tickets)
        while left:
            number, item = await self.queue.get()
            left -= isinstance(item, Ticket)
            yield number, item


def event(data: Any) -> str:
    """One server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, allow_nan=False)}\n\n"


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., Any], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        raise CancelledError from None  # the server is gone, and with it whoever asked
