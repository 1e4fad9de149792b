"""Commands of the library as processes of their own, which end with the script that began them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: The exit code of a script that a signal ended.
STOPPED = 130
#: From Linux's prctl.h: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: Ctrl-C, `kill` and `timeout`, a terminal that is closed.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _end_with_parent() -> Callable[[], None] | None:
    """For a child, before it becomes a command: if the script is killed with no chance to end its commands,
    Linux ends them, and the next script does not find them training. The thread that waits for a command
    is the one that began it, which is whose end counts."""
    if sys.platform != "linux":
        return None
    control, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        control(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it is gone already
            os._exit(STOPPED)

    return ask


class _Commands:
    """Those that are running. Once stopped, none begins."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        # One thread may hold it twice: a signal is handled between any two lines of the main one.
        self._lock, self._stopped = threading.RLock(), False

    def run(self, words: Sequence[str], log: Path) -> int:
        """A command, to its end; the exit code."""
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
                    preexec_fn=_end_with_parent(),
                )
            self._running.add(command)
        try:
            return command.wait()
        except KeyboardInterrupt:  # it has been told
            command.wait()
            raise
        finally:
            with self._lock:
                self._running.remove(command)

    def stop(self) -> None:
        """Training saves what it has."""
        with self._lock:
            self._stopped = True
            for command in tuple(self._running):
                command.terminate()

    def allow(self) -> None:
        self._stopped = False


_COMMANDS = _Commands()


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Around all that a script does: a signal ends the commands that are running, keeps others from being
    begun, and ends the script when they are done."""

    def interrupt(*_: object) -> None:
        _COMMANDS.stop()
        raise KeyboardInterrupt

    previous = {}
    if threading.current_thread() is threading.main_thread():  # signals are its own
        previous = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    _COMMANDS.allow()
    try:
        yield
    except KeyboardInterrupt:
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
