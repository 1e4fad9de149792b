"""Studies in lanes: shares of the time, and what a signal does to commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from xdlm.cli import lanes as module
from xdlm.cli.lanes import LaneStudy
from xdlm.cli.processes import STOPPED

#: A script whose commands are another program.
SCRIPT = """
import sys
from pathlib import Path
from xdlm.cli import processes
from xdlm.cli.lanes import LaneStudy

class Study(LaneStudy):
    def steps_left(self, run): return 1
    def step_of_newest(self, run): return 0
    def folder(self, run): return Path("absent")
    def measure(self, run): pass

processes.sys.executable = sys.argv[1]

@processes.stopped_by_signals()
def main():
    {body}

main()
"""
STUDY = 'Study({run: Path(run) for run in "abcd"}, [*"abcd"], logs=Path("logs"), minutes=9, lanes=2).run()'
ALONE = 'processes.xdlm(Path("logs/a.log"), "train", "a")'
#: Says that it is there, and waits; a run may fail instead.
COMMAND = """#!/bin/sh
echo began
if [ "$4" = "$FAILS" ]; then exit 1; fi
trap 'sleep 0.3; echo saved; exit 0' TERM
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


def test_with_a_lane_each_all_have_all_of_it() -> None:
    """They are at it all at the same time."""
    study = Study(lanes=3)
    shares = [study._take_share(run) / 60 for run in WEIGHTS]
    assert shares == pytest.approx([50, 50, 50], abs=0.1)


class Chain(Study):
    """Each needs the one before it, which takes a moment; one may be cut short."""

    stops = ""

    def __init__(self, lanes: int) -> None:
        self.done: list[str] = []
        super().__init__(lanes)

    def steps_left(self, run: str) -> int:
        return int(run not in self.done)

    def needs(self, run: str) -> str | None:
        return {"small": "large", "other": "small"}.get(run)

    def xdlm(self, name: str, *words: str) -> None:
        time.sleep(0.05)
        if name != self.stops:
            self.done.append(name)


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_what_needs_another_waits_for_it(lanes: int) -> None:
    study = Chain(lanes)
    study.run()
    assert study.done == ["large", "small", "other"]


def test_what_needs_another_that_was_cut_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    study = Chain(3)
    study.stops = "small"
    study.run()
    assert study.done == ["large"]
    assert capsys.readouterr().out == "other: small has steps left, not begun\n"


def test_what_lanes_are_promised_is_not_shared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four alike in two lanes, each of which uses what it has: half of the time for each."""
    monkeypatch.setitem(WEIGHTS, "large", 10.0)
    monkeypatch.setitem(WEIGHTS, "last", 10.0)
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    study = Study(lanes=2)
    first = [study._take_share(run) for run in ("large", "small")]
    now = 25 * 60.0
    study._give_back("large")
    third = study._take_share("other")
    study._give_back("small")
    assert [*first, third, study._take_share("last")] == pytest.approx([25 * 60] * 4)


def test_what_cannot_begin_leaves_its_share_to_others() -> None:
    study = Study(lanes=1, fails="large")
    with pytest.raises(ValueError, match="no codec"):
        study.run()
    assert study.minutes == pytest.approx({"small": 25, "other": 50}, abs=0.1)


@pytest.mark.parametrize(
    ("body", "fails", "runs", "number"),
    [
        (STUDY, "", "ab", signal.SIGINT),
        (STUDY, "", "ab", signal.SIGTERM),
        (STUDY, "", "ab", signal.SIGHUP),
        (STUDY, "a", "abc", signal.SIGTERM),  # all wait for those that have not failed
        (ALONE, "", "a", signal.SIGINT),
    ],
)
def test_a_signal_ends_what_is_running_and_begins_nothing_else(
    tmp_path: Path, body: str, fails: str, runs: str, number: int
) -> None:
    """Two runs of a study that has four, one of which may have failed before; or a command alone."""
    command = tmp_path / "command"
    command.write_text(COMMAND)
    command.chmod(0o755)
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("{body}", body), str(command)],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, env={**os.environ, "FAILS": fails},
    )  # fmt: skip
    _wait_for(lambda: said_of(tmp_path) == dict.fromkeys(runs, "began\n"))
    time.sleep(0.2)
    os.kill(script.pid, number)
    _, said = script.communicate(timeout=60)
    assert script.returncode == STOPPED and said == "stopped; started again, it goes on\n"
    expected = {run: "began\n" if run == fails else "began\nsaved\n" for run in runs}
    assert said_of(tmp_path) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells children that their parent ended")
def test_commands_end_with_a_script_that_is_killed(tmp_path: Path) -> None:
    command = tmp_path / "command"
    command.write_text(COMMAND)
    command.chmod(0o755)
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("{body}", STUDY), str(command)], cwd=tmp_path,
        env={**os.environ, "FAILS": ""},
    )  # fmt: skip
    _wait_for(lambda: said_of(tmp_path) == dict.fromkeys("ab", "began\n"))
    time.sleep(0.2)
    script.kill()
    script.wait()
    _wait_for(lambda: said_of(tmp_path) == dict.fromkeys("ab", "began\nsaved\n"))


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def said_of(folder: Path) -> dict[str, str]:
    return {f.stem: f.read_text() for f in folder.glob("logs/*.log")}
