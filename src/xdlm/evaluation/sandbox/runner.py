"""Running a program in a sandbox: a process of its own, limited, watched and killed in time.

For example:

    run = run_code("assert sorted([2, 1]) == [1, 2]")
    print(run.verdict, run.guards)

What a run is protected by stands in its result, since it depends on the machine: resource limits and an own
folder always; namespaces (no network, no foreign process, everything outside the folder read-only) and a
filter of system calls (no new process, no socket) where the kernel lends them; else a guard inside Python,
which is no wall against one who means to climb it. Files that the user may read, a program may read too.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from xdlm.errors import UserError

#: As published tables split programs: one that does not compile, raises, or runs out of its limits has
#: `failed`; one whose assertion does not hold is `wrong`.
Verdict = Literal["passed", "wrong", "failed"]

_CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    seconds: float = 10.0
    """Of wall-clock time."""
    memory_mb: int = 1024
    """Of address space, the interpreter's included."""
    output_bytes: int = 1 << 16
    """Printed, after which it is stopped."""
    file_mb: int = 16
    """In a file."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 3600 or min(self.memory_mb, self.output_bytes, self.file_mb) < 1:
            raise UserError("a sandbox needs positive limits, and at most an hour")


@dataclass(frozen=True)
class Guards:
    """What stands around a program, apart from resource limits."""

    namespaces: bool
    """No network, no foreign process, all but its folder read-only: by the kernel."""
    seccomp: bool
    """No new process and no socket: by the kernel."""
    hook: bool
    """Python refuses sockets, processes and changes outside the folder."""

    def __str__(self) -> str:
        return ", ".join(["rlimits", *(name for name, on in asdict(self).items() if on)])


@dataclass(frozen=True)
class Run:
    """What became of a program, why, what it printed, how long it took and what stood around it."""

    verdict: Verdict
    why: str
    output: str
    seconds: float
    guards: Guards


@cache
def available_guards() -> Guards:
    """The best that this machine offers, tried out once."""
    if sys.platform != "linux":
        raise UserError("generated programs run on Linux alone: the sandbox is made of its limits")
    alone = (Guards(True, False, hook=False), Guards(False, True, hook=False))
    namespaces, seccomp = (_attempt("pass", Limits(), one) is not None for one in alone)
    return Guards(namespaces, seccomp, hook=not (namespaces and seccomp))


def run_code(program: str, limits: Limits | None = None, guards: Guards | None = None) -> Run:
    """Run a program to its end or to the end of its limits. By default under the best guards there are."""
    run = _attempt(program, limits or Limits(), guards or available_guards())
    if run is None:
        raise UserError(f"this machine does not offer the sandbox {guards}")
    return run


def _attempt(program: str, limits: Limits, guards: Guards) -> Run | None:
    """None where the guards could not be set up, in which case the program has not been started."""
    with tempfile.TemporaryDirectory(prefix="xdlm-sandbox-", ignore_cleanup_errors=True) as scratch:
        nonce = secrets.token_hex(16)
        job = {"program": program, "nonce": nonce, "scratch": scratch}
        job |= asdict(limits) | asdict(guards)
        started = time.monotonic()
        output, report, stopped = _watched(job, limits, scratch)
        seconds = time.monotonic() - started
    verdict, why = _read_verdict(report, nonce)
    if verdict == "unguarded":
        return None
    if stopped:
        verdict, why = "failed", stopped
    return Run(verdict, why, output.decode(errors="replace"), seconds, guards)


def _watched(job: dict[str, Any], limits: Limits, scratch: str) -> tuple[bytes, bytes, str]:
    """What the child printed and reported, and why it was stopped if it was."""
    report, report_in = os.pipe()
    environment = {"HOME": scratch, "TMPDIR": scratch, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_CHILD), str(report_in)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=scratch, env=environment,
        start_new_session=True, pass_fds=(report_in,),
    )  # fmt: skip
    os.close(report_in)
    assert child.stdin is not None and child.stdout is not None
    try:
        deadline = time.monotonic() + limits.seconds
        with suppress(BrokenPipeError):  # it died before it read its job, and gives no verdict
            child.stdin.write(json.dumps(job).encode())
            child.stdin.close()
        return _collected(child.stdout.fileno(), report, deadline, limits)
    finally:
        _kill_group(child.pid)
        child.wait()
        child.stdout.close()
        os.close(report)


def _collected(
    output: int, report: int, deadline: float, limits: Limits
) -> tuple[bytes, bytes, str]:
    """Read until the child reports or dies, or has to be stopped."""
    found = {output: b"", report: b""}
    with selectors.DefaultSelector() as ready:
        for descriptor in found:
            ready.register(descriptor, selectors.EVENT_READ)
        while report in ready.get_map():
            left = deadline - time.monotonic()
            events = ready.select(left) if left > 0 else []
            if not events:
                return found[output], found[report], f"more than {limits.seconds:g} seconds"
            for key, _ in events:
                piece = os.read(key.fd, 1 << 14)
                found[key.fd] += piece
                if not piece:
                    ready.unregister(key.fd)
            if max(map(len, found.values())) > limits.output_bytes:
                kept = found[output][: limits.output_bytes]
                return kept, b"", f"more than {limits.output_bytes:,} bytes of output"
    return found[output], found[report], ""


def _kill_group(leader: int) -> None:
    """The child leads a session of its own: all that it started, and with it its namespace."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _read_verdict(report: bytes, nonce: str) -> tuple[Any, str]:
    """What the child told; a program may have written anything there, however deep."""
    try:
        told, verdict, why = json.loads(report)
    except (ValueError, TypeError, RecursionError):
        return "failed", "ended without a verdict"
    if told != nonce:
        return "failed", "gave its own verdict"
    return verdict, why
