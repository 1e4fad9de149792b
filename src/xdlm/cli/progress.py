"""Progress bars for anything over a few seconds; silent where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress


def console() -> Console:
    """For messages and bars: standard error, so that results on standard output stay clean."""
    return Console(stderr=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with (done, total)."""
    screen = console()
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(escape(what), total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """For what takes as long as it takes: reading or writing a large model."""
    with progress(what):
        yield
