"""Signals that end a run in good order."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interruptible() -> Iterator[Callable[[], signal.Signals | None]]:
    """Let Ctrl-C, or SIGTERM, finish the step and save; a second Ctrl-C ends at once. What it yields tells
    which of them came first, if one did.

    What comes within a second is the same Ctrl-C: `torchrun` passes it on, and the terminal sent it too.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield lambda: None
        return
    first, came = math.inf, None

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal first, came
        if signum == signal.SIGINT and time.monotonic() > first + 1:
            raise KeyboardInterrupt
        if came is None:
            first, came = time.monotonic(), signal.Signals(signum)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
