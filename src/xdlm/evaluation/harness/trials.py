"""Programs that a model wrote, tried in the sandbox."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from xdlm.evaluation.sandbox import Run, run_code

#: Called after every program, where somebody wants to know: lm-eval is between whoever asks and who tries,
#: and hands nothing down.
_ON_RUN: ContextVar[Callable[[], None] | None] = ContextVar("on_run", default=None)


@contextmanager
def told_of_runs(on_run: Callable[[], None]) -> Iterator[None]:
    token = _ON_RUN.set(on_run)
    try:
        yield
    finally:
        _ON_RUN.reset(token)


def tried(programs: list[str]) -> dict[str, float]:
    """How many of a problem's programs came to which end."""
    runs = [_run(program) for program in programs]
    ends = Counter(run.verdict for run in runs)
    late = sum(run.why.startswith("more than") for run in runs)
    return {
        "passed": float(ends["passed"]), "wrong": float(ends["wrong"]),
        "failed": float(ends["failed"]), "out_of_limits": float(late),
    }  # fmt: skip


def _run(program: str) -> Run:
    run, on_run = run_code(program), _ON_RUN.get()
    if on_run is not None:
        on_run()
    return run
