"""A study as a script: runs that train in lanes within so many minutes, each measured when it is done.

Every command is a process of its own, whose output goes to a file: several may run at a time. Started
again, a study goes on where it stopped; what is left of the minutes is shared among the runs that have
steps left. A signal ends the commands that are running, so that `timeout 600 python run.py ...` bounds
all of it.
"""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock

from xdlm.cli.processes import xdlm
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
        #: When those that are being trained will end, at the latest.
        self._promised: dict[str, float] = {}
        self._sharing = Lock()

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
        ):
            for run in list(self._waiting):  # one by one: a later one looks for what it waits for
                self._trained[run] = lanes.submit(self._train, run)
            measured = [benches.submit(self._measure, run) for run in self._chosen]
            for work in (*self._trained.values(), *measured):
                work.result()

    def _train(self, run: str) -> None:
        """Until it is done, or its share of what is left of the time is."""
        try:
            needed = self.needs(run)
            if needed is not None:
                self.wait_for(needed)
            self.before(run)
            share = self._take_share(run)
            if needed is not None and self.steps_left(needed):
                print(f"{run}: {needed} has steps left, not begun", flush=True)
            elif share > 0:
                self._train_for(run, share)
        finally:
            self._give_back(run)

    def _train_for(self, run: str, seconds: float) -> None:
        # It may have been cut before its first step.
        more = ["--resume"] if latest_checkpoint(self.folder(run)) is not None else []
        if run in self._steps:
            more += ["--train.steps", str(self._steps[run])]
        recipe = str(self._recipes[run])
        minutes = ["--train.minutes", f"{seconds / 60:.4f}"]
        self.xdlm(run, "train", recipe, *minutes, *self.flags(run), *more)

    def _take_share(self, run: str) -> float:
        """Seconds: of what all lanes have left and is not promised to others, as much as its part of the
        work that waits, but no more than is left in one lane. All of that where all have a lane."""
        with self._sharing:
            now = time.monotonic()
            left = self._end - now
            free = self._lanes * left - sum(max(0.0, end - now) for end in self._promised.values())
            works = {each: self.work(each) for each in self._waiting}
            rest = sum(works.values())
            for work in sorted(works.values(), reverse=True):
                if free * work <= left * rest:
                    break
                free, rest = free - left, rest - work  # it has a lane for itself, to the end
            share = min(left, free * works[run] / rest) if rest > 0 else left
            self._waiting.remove(run)
            self._promised[run] = now + share
        return share

    def _give_back(self, run: str) -> None:
        """What is left of its share, or its place among those that wait for one."""
        with self._sharing:
            if self._promised.pop(run, None) is None:
                self._waiting.remove(run)

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
