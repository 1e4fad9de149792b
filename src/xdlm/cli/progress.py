"""Progress of anything over a few seconds: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Seconds between two lines where there is no terminal: what takes less leaves none.
_EVERY = 30.0
_WHAT = TextColumn("{task.description}", markup=False)


def console(*, stderr: bool = True) -> Console:
    """For messages and bars: standard error, so that results on standard output stay clean. All is shown as
    it is: a path like cifar10:train: holds no picture of a train, and brackets are no colours."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with (done, total), the total being 0 where nobody knows it."""
    screen = console()
    if not screen.is_terminal:
        say = _now_and_then(screen)
        yield lambda done, total: say(f"{what}: {done:,}" + (f" of {total:,}" if total else ""))
        return
    columns = (_WHAT, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


@contextmanager
def telling(what: str) -> Iterator[Callable[[str], None]]:
    """For what has no known end. Yields a function to call with how far it is, in words."""
    screen = console()
    if not screen.is_terminal:
        yield _now_and_then(screen)
        return
    columns = (SpinnerColumn(), _WHAT, TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda how_far: bar.update(task, description=how_far)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """For what takes as long as it takes: reading or writing a large model."""
    with progress(what):
        yield


def _now_and_then(screen: Console) -> Callable[[str], None]:
    """Prints what it is told, and the time, if it has not done so of late."""
    began = told = time.monotonic()

    def say(how_far: str) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= _EVERY:
            told = now
            line = f"{how_far}, {now - began:.0f} s"
            screen.print(line, soft_wrap=True)

    return say
