"""Progress of anything over a few seconds: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

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
_COUNT = TextColumn("{task.fields[count]}", markup=False)


class Show(Protocol):
    """Takes how much is done, of how much (0 where nobody knows it), and the name of what is under way."""

    def __call__(self, done: int, total: int, now: str = "") -> None: ...


def console(*, stderr: bool = True) -> Console:
    """For messages and bars: standard error, so that results on standard output stay clean. All is shown as
    it is: a path like cifar10:train: holds no picture of a train, and brackets are no colours."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


@contextmanager
def progress(what: str) -> Iterator[Show]:
    """Yields a function to call with (done, total), and with what is under way where that has a name."""
    screen = console()
    if not screen.is_terminal:
        tell = _now_and_then(screen)

        def say(done: int, total: int, now: str = "") -> None:
            tell(f"{_named(what, now)}: {_counted(done, total)}")

        yield say
        return
    columns = (_WHAT, BarColumn(), _COUNT, TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(what, total=None, count="")

        def draw(done: int, total: int, now: str = "") -> None:
            bar.update(
                task, completed=done, total=total or None, count=_counted(done, total),
                description=_named(what, now),
            )  # fmt: skip

        yield draw


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


def _named(what: str, now: str) -> str:
    return f"{what} {now}" if now else what


def _counted(done: int, total: int) -> str:
    return f"{done:,} of {total:,}" if total else f"{done:,}"


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
