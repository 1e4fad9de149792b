"""Studies in lanes: shares of the time, and what a signal does to commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xdlm.cli.lanes import STOPPED, LaneStudy

#: A study whose commands say that they are there, and wait.
SCRIPT = """
import sys
from pathlib import Path
from xdlm.cli import lanes

class Study(lanes.LaneStudy):
    def steps_left(self, run): return 1
    def step_of_newest(self, run): return 0
    def folder(self, run): return Path("absent")
    def measure(self, run): pass

lanes.sys.executable = sys.argv[1]
Study({run: Path(run) for run in "abcd"}, [*"abcd"], logs=Path("logs"), minutes=9, lanes=2).run()
"""
COMMAND = """#!/bin/sh
echo began
trap 'echo saved; exit 0' TERM
while :; do sleep 0.05; done
"""
WEIGHTS = {"large": 30.0, "small": 10.0, "other": 10.0}


class Study(LaneStudy):
    """Nothing is run: what is said of the shares is kept."""

    def __init__(self, lanes: int, fails: str = "") -> None:
        self.minutes: dict[str, float] = {}
        self._fails = fails
        recipes = {run: Path(run) for run in WEIGHTS}
        super().__init__(recipes, list(recipes), logs=Path("logs"), minutes=50, lanes=lanes)

    def steps_left(self, run: str) -> int:
        return 1

    def step_of_newest(self, run: str) -> int:
        return 0

    def folder(self, run: str) -> Path:
        return Path("absent")

    def work(self, run: str) -> float:
        return WEIGHTS[run]

    def before(self, run: str) -> None:
        if run == self._fails:
            raise ValueError("no codec")

    def measure(self, run: str) -> None: ...

    def xdlm(self, name: str, *words: str) -> None:
        self.minutes[name] = float(words[words.index("--train.minutes") + 1])


def test_time_is_shared_by_work() -> None:
    """Nothing here takes any time: what is left is all of it for each."""
    study = Study(lanes=1)
    study.run()
    assert study.minutes == pytest.approx({"large": 30, "small": 25, "other": 50}, abs=0.1)
    study = Study(lanes=3)
    study.run()
    assert study.minutes == pytest.approx(dict.fromkeys(WEIGHTS, 50), abs=0.1)


def test_what_cannot_begin_leaves_its_share_to_others() -> None:
    study = Study(lanes=1, fails="large")
    with pytest.raises(ValueError, match="no codec"):
        study.run()
    assert study.minutes == pytest.approx({"small": 25, "other": 50}, abs=0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_is_running_and_begins_nothing_else(tmp_path: Path, number: int) -> None:
    command = tmp_path / "command"
    command.write_text(COMMAND)
    command.chmod(0o755)
    script = [sys.executable, "-c", SCRIPT, str(command)]
    study = subprocess.Popen(script, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    logs = [tmp_path / "logs" / f"{run}.log" for run in "ab"]
    deadline = time.monotonic() + 60
    while not all(log.is_file() and log.read_text() for log in logs):
        assert time.monotonic() < deadline and study.poll() is None
        time.sleep(0.05)
    os.kill(study.pid, number)
    _, said = study.communicate(timeout=60)
    assert study.returncode == STOPPED and said == "stopped; started again, it goes on\n"
    assert [log.read_text() for log in logs] == ["began\nsaved\n"] * 2
    assert sorted(f.name for f in (tmp_path / "logs").iterdir()) == ["a.log", "b.log"]
