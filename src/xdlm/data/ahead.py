"""Reading ahead: a thread runs an iterator some items before whoever asks for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    """What comes after the last item: nothing, or the error that ended them."""

    error: BaseException | None = None


class Ahead(Generic[T]):
    """The same items in the same order, read by one thread at most `depth` before they are asked for.
    An error of the source is raised where its item would have been. Leaving the block ends the thread."""

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        self._items = items
        self._queue: queue.Queue[T | _End] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="reading ahead", daemon=True)

    def __enter__(self) -> Ahead[T]:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        while self._thread.is_alive():  # it may wait for room: make some until it sees the flag
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item = self._queue.get()
        if not isinstance(item, _End):
            return item
        self._queue.put(item)  # whoever asks again is told again
        if item.error is not None:
            raise item.error
        raise StopIteration

    def _fill(self) -> None:
        end = _End()
        try:
            for item in self._items:
                self._queue.put(item)
                if self._stop.is_set():
                    return
        except BaseException as error:  # not lost with the thread: raised where the item is missed
            end = _End(error)
        self._queue.put(end)
