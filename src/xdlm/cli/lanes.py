"""A study as a script: runs that train in lanes within so many minutes, each measured when it is done.

Every command is a process of its own, whose output goes to a file: several may run at a time. Started
again, a study goes on where it stopped; what is left of the minutes is shared among the runs that have
steps left. Ctrl-C or SIGTERM ends the commands that are running, so that `timeout 600 python run.py ...`
bounds all of it.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from xdlm.config import load_config
from xdlm.report.study.beside import add_seconds
from xdlm.training.checkpoint import latest_checkpoint, open_checkpoint
from xdlm.training.device import pick_device


class LaneStudy(ABC):
    """`recipes` are the runs by name, in the order in which they are trained: what others wait for, and
    what matters most, comes first. Those named `chosen` are trained and measured."""

    def __init__(
        self,
        recipes: Mapping[str, Path],
        chosen: list[str],
        *,
        logs: Path,
        minutes: float,
        lanes: int = 1,
        benches: int = 1,
        times: Path | None = None,
        steps: Mapping[str, int] | None = None,
    ) -> None:
        """What commands took is added to the file `times`. `steps` are numbers of training steps other
        than the recipe's."""
        self._recipes, self._logs, self._times = recipes, logs, times
        self._steps = steps if steps is not None else {}
        self._lanes, self._benches = lanes, benches
        self._chosen = [run for run in recipes if run in chosen]
        self._end = time.monotonic() + 60 * minutes
        self._waiting = [run for run in self._chosen if self.steps_left(run)]
        self._trained: dict[str, Future[None]] = {}

    @abstractmethod
    def measure(self, run: str) -> None:
        """Called when a run has trained as far as it will, if it has left a checkpoint."""

    def needs(self, run: str) -> str | None:
        """Another run that must be complete before this one begins."""
        return None

    def before(self, run: str) -> None:
        """Called when it is a run's turn to be trained; may wait."""
        return

    def flags(self, run: str) -> Sequence[str]:
        """Settings of its training other than the recipe's."""
        return ()

    def work(self, run: str) -> float:
        """How much is left of its training, in a unit that all runs share."""
        return self.steps_left(run)

    def run(self) -> None:
        with (
            ThreadPoolExecutor(self._lanes) as lanes,
            ThreadPoolExecutor(self._benches) as benches,
            stopped_by_signals(),  # innermost: lanes and benches wait for what is running
        ):
            self._trained = {run: lanes.submit(self._train, run) for run in list(self._waiting)}
            measured = [benches.submit(self._measure, run) for run in self._chosen]
            for work in (*self._trained.values(), *measured):
                work.result()

    def _train(self, run: str) -> None:
        """Until it is done, or its share of what is left of the time is."""
        needed = self.needs(run)
        try:
            if needed is not None:
                self.wait_for(needed)
            self.before(run)
            share = (self._end - time.monotonic()) * self._share_of(run)
        finally:
            self._waiting.remove(run)
        if share <= 0 or (needed is not None and self.steps_left(needed)):
            return
        # It may have been cut before its first step.
        more = ["--resume"] if latest_checkpoint(self.folder(run)) is not None else []
        if run in self._steps:
            more += ["--train.steps", str(self._steps[run])]
        recipe = str(self._recipes[run])
        minutes = ["--train.minutes", f"{share / 60:.4f}"]
        self.xdlm(run, "train", recipe, *minutes, *self.flags(run), *more)

    def _share_of(self, run: str) -> float:
        """By the work that waits: all of the time for each where there are as many lanes as runs."""
        if self._lanes >= len(self._waiting):
            return 1.0
        return min(1.0, self._lanes * self.work(run) / sum(map(self.work, list(self._waiting))))

    def _measure(self, run: str) -> None:
        self.wait_for(run)
        if self.step_of_newest(run):
            self.measure(run)

    def wait_for(self, run: str) -> None:
        """Whether it succeeds or not; what it left says how far it came."""
        if run in self._trained:
            wait([self._trained[run]])

    def folder(self, run: str) -> Path:
        """Where it is trained; if that is not what the recipe says, `flags` must say so too."""
        return Path(load_config(self._recipes[run]).train.out)

    def steps_left(self, run: str) -> int:
        wanted = self._steps.get(run, load_config(self._recipes[run]).train.steps)
        return max(0, wanted - self.step_of_newest(run))

    def step_of_newest(self, run: str) -> int:
        newest = latest_checkpoint(self.folder(run))
        return 0 if newest is None else open_checkpoint(newest).step

    def xdlm(self, name: str, *words: str) -> None:
        """A command of the run that its name begins with."""
        began = time.monotonic()
        xdlm(self._logs / f"{name}.log", *words)
        if self._times is not None:
            add_seconds(self._times, name, time.monotonic() - began)


class _Commands:
    """Those that are running. Once stopped, none begins."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock, self._stopped = threading.Lock(), False

    def run(self, words: Sequence[str], log: Path) -> int:
        """A command of the library, to its end; the exit code."""
        with self._lock:
            if self._stopped:
                sys.exit(f"{log.stem} was not begun")
            print(" ".join(["$ xdlm", *words, f"(-> {log})"]), flush=True)
            with log.open("ab") as stream:  # a session of its own: Ctrl-C is for the script
                command = subprocess.Popen(
                    [sys.executable, "-m", "xdlm.cli.main", *words],
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,
                )
            self._running.add(command)
        try:
            return command.wait()
        finally:
            with self._lock:
                self._running.remove(command)

    def stop(self) -> None:
        """Training saves what it has."""
        with self._lock:
            self._stopped = True
            for command in self._running:
                command.terminate()

    def allow(self) -> None:
        self._stopped = False


_COMMANDS = _Commands()
#: The exit code of a script that a signal ended.
STOPPED = 130


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Ctrl-C or SIGTERM ends commands that are running and keeps others from being begun, and then the
    script."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = {}
    if threading.current_thread() is threading.main_thread():  # signals are its own
        # A script in the background would ignore the first.
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, interrupt)
    _COMMANDS.allow()
    try:
        yield
    except KeyboardInterrupt:
        _COMMANDS.stop()
        print("stopped; started again, it goes on", file=sys.stderr, flush=True)
        raise SystemExit(STOPPED) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def xdlm(log: Path, *words: str) -> None:
    """A command of the library; ends the script if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    code = _COMMANDS.run(words, log)
    print(f"{log.stem}: {time.monotonic() - began:.0f} s, exit code {code}", flush=True)
    if code:
        sys.exit(
            f"{log.stem} failed: {log.read_text(encoding='utf-8', errors='replace').splitlines()[-1:]}"
        )


def lane_options(description: str, runs: Mapping[str, Path], out: Path) -> argparse.ArgumentParser:
    """What every study is told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, required=True, help="for all training together")
    parser.add_argument("--runs", nargs="+", choices=list(runs), default=list(runs))
    parser.add_argument("--lanes", type=int, default=1, help="runs that train at a time")
    parser.add_argument("--benches", type=int, default=1, help="runs that are measured at a time")
    parser.add_argument("--out", type=Path, default=out)
    # As in training; float32 takes a GPU several times as long.
    usual = "bfloat16" if pick_device("auto").type == "cuda" else "float32"
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default=usual,
                        help=f"of the trunk, in measuring (here {usual})")  # fmt: skip
    return parser
