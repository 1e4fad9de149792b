"""A few threads for work that may be long and is not the model's, with a bounded queue before them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from xdlm.serve.requests import Closed, Overloaded

T = TypeVar("T")
Check = Callable[[], None]


class Workers:
    """Work is given a function to call often: it raises once nobody waits for the result. The threads are
    daemons, so that the process can end while one of them is busy."""

    def __init__(self, name: str, *, threads: int, waiting: int) -> None:
        self.threads, self.waiting = threads, waiting
        self._queue: deque[tuple[Callable[[Check], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._seconds = 1.0  # of a piece of work, lately
        for number in range(threads):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def submit(self, work: Callable[[Check], T]) -> Future[T]:
        """Cancel what it returns to stop it, also when it has begun. Raises `Overloaded` or `Closed`."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise Closed("the server is shutting down")
            self._queue = deque(item for item in self._queue if not item[1].cancelled())
            if len(self._queue) >= self.waiting:
                rounds = len(self._queue) / self.threads + 1
                raise Overloaded(max(1, math.ceil(rounds * self._seconds)))
            self._queue.append((work, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Stop, whatever is going on: those who wait get `Closed`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._closed):
                    self._changed.wait()
                if not self._queue:
                    return
                work, future = self._queue.popleft()
            self._do(work, future)

    def _do(self, work: Callable[[Check], Any], future: Future[Any]) -> None:
        # The future is not marked as running until the work is done: so it can be cancelled.
        def check() -> None:
            if self._closed:
                raise Closed("the server is shutting down")
            if future.cancelled():
                raise CancelledError

        began = time.monotonic()
        try:
            check()
            found = work(check)
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        finally:
            self._seconds += 0.1 * (time.monotonic() - began - self._seconds)
        if future.set_running_or_notify_cancel():
            future.set_result(found)
