"""Programs that mean harm end as failed, within their limits, and leave everything as it was."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xdlm.errors import UserError
from xdlm.evaluation.passing import pass_at_k
from xdlm.evaluation.sandbox import Guards, Limits, available_guards, run_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of Linux")

ONLY_PYTHON = Guards(namespaces=False, seccomp=False, hook=True)
SHORT = Limits(seconds=1.0)
FORKING = "_posixsubprocess"
FORK = f"""
r, w = os.pipe()
{FORKING}.fork_exec(
    [b"/bin/rm", os.fsencode(VICTIM)], [b"/bin/rm"], True, (w,), None, None, -1, -1, -1, -1, -1, -1, r, w,
    True, False, -1, None, None, None, -1, None, *([True] if sys.version_info < (3, 14) else []))
os.close(w)
os.read(r, 1)
"""
VERDICT = """
import os
for fd in range(3, 64):
    if os.path.exists(f'/proc/self/fd/{{fd}}'):
        os.write(fd, {})
os._exit(0)
"""
HARM = {
    "an infinite loop": "while True: pass",
    "a loop that catches all": "while True:\n try:\n  while True: pass\n except BaseException: pass",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "a bomb of processes": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'pass'])",
    "10 GB": "x = bytearray(10 * 2**30)",
    "a network call": "import socket\nsocket.create_connection(('127.0.0.1', PORT), timeout=5)",
    "a deletion": "import os\nos.remove(VICTIM)",
    "a deletion of a tree": "import os, shutil\nshutil.rmtree(os.path.dirname(VICTIM))",
    "an overwriting": "open(VICTIM, 'w').write('gone')",
    "a deletion from an open folder": "import os\nat = os.open(os.path.dirname(VICTIM), os.O_RDONLY)\n"
    "os.remove('precious', dir_fd=at)",
    "a new name": "import os\nos.rename(VICTIM, VICTIM + '.old')",
    "rights of a file that is open": "import os\nos.fchmod(os.open(VICTIM, os.O_RDONLY), 0)",
    "times of a file that is open": "import os\nos.utime(os.open(VICTIM, os.O_RDONLY), (0, 0))",
    "a silent fork": f"import os, {FORKING}, sys\n{FORK}",
    "a silent fork anew": f"import os, {FORKING}, sys\ndel sys.modules['{FORKING}']\n"
    f"import {FORKING}\n{FORK}",
    "a huge print": "while True: print('x' * 10_000)",
    "a huge file": "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "an early exit": "import sys\nsys.exit(0)",
    "a quiet exit": "import os\nos._exit(0)",
    "a made-up verdict": VERDICT.format("""b'["", "passed", ""]'"""),
    "a verdict that is no list": VERDICT.format("b'5'"),
    "a verdict without an end": VERDICT.format("b'[' * 50_000"),
    "a flood of verdicts": "import os\n"
    "fd = [f for f in range(3, 64) if os.path.exists(f'/proc/self/fd/{f}')]\n"
    "while True: [os.write(f, bytes(1 << 16)) for f in fd]",
    "an escape from its group": "import ctypes, os\nctypes.CDLL(None).prctl(1, 0)\nos.setsid()\n"
    "while True: pass",
    "a signal": "import os\nos.kill(OUTSIDER, 9)",
}


@pytest.fixture(params=["the best there is", "only python"])
def guards(request: pytest.FixtureRequest) -> Guards:
    return ONLY_PYTHON if request.param == "only python" else available_guards()


@pytest.fixture(scope="module")
def listening() -> int:
    """A port of this machine that answers."""
    import socket

    server = socket.create_server(("127.0.0.1", 0))
    yield server.getsockname()[1]
    server.close()


@pytest.mark.parametrize("what", HARM)
def test_harm_ends_as_failed(what: str, guards: Guards, tmp_path: Path, listening: int) -> None:
    victim = tmp_path / "kept" / "precious"
    victim.parent.mkdir()
    victim.write_text("here")
    names = {"VICTIM": repr(str(victim)), "PORT": str(listening), "OUTSIDER": str(os.getpid())}
    program = HARM[what]
    for name, value in names.items():
        program = program.replace(name, value)
    started = time.monotonic()
    run = run_code(program, SHORT, guards)
    assert run.verdict == "failed" and run.why, run
    assert time.monotonic() - started < SHORT.seconds + 2  # a busy machine starts slowly
    assert len(run.output) <= SHORT.output_bytes
    assert victim.read_text() == "here"
    assert victim.stat().st_mode & 0o400 and victim.stat().st_mtime > 0
    assert [p.name for p in victim.parent.iterdir()] == ["precious"]


def test_verdicts(guards: Guards) -> None:
    """A program that does not compile or raises has failed; one whose assertion is false is wrong."""
    solution = "def double(x):\n    return 2 * x\n"
    assert run_code(solution + "assert double(2) == 4", None, guards).verdict == "passed"
    assert run_code(solution + "assert double(2) == 5", None, guards).verdict == "wrong"
    for broken in ("def double(x: return", "double(2)", "raise KeyError(3)", "\0"):
        assert run_code(broken, None, guards).verdict == "failed"


def test_ordinary_programs_run(guards: Guards) -> None:
    """Threads, files of its own and a good part of the standard library."""
    program = (
        "import threading, tempfile, heapq, re, collections, itertools, math, datetime, os\n"
        "out = []\n"
        "t = threading.Thread(target=out.append, args=(1,)); t.start(); t.join()\n"
        "open('mine', 'w').write('x'); os.rename('mine', 'own'); os.remove('own')\n"
        "with tempfile.NamedTemporaryFile('w') as f: f.write('y')\n"
        "fd = os.open('mine', os.O_CREAT | os.O_WRONLY); os.fchmod(fd, 0o600); os.close(fd)\n"
        "import subprocess\n"
        "print('hello'); assert out == [1]"
    )
    run = run_code(program, None, guards)
    assert (run.verdict, run.output) == ("passed", "hello\n"), run


def test_a_run_sees_neither_the_environment_nor_the_last_run(
    guards: Guards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_USER", "x")
    run_code("open('left', 'w').write('x')", None, guards)
    program = (
        "import os\nassert os.listdir('.') == []\nassert 'SECRET_OF_THE_USER' not in os.environ"
    )
    assert run_code(program, None, guards).verdict == "passed"


def test_guards_are_named_and_never_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(ONLY_PYTHON) == "rlimits, hook"
    best = available_guards()
    assert best.hook == (not (best.namespaces and best.seccomp))
    assert run_code("pass").guards == best


def test_the_kernel_guards_even_foreign_code() -> None:
    """Where the filter of system calls is there, it holds for C too."""
    if not available_guards().seccomp:
        pytest.skip("this machine lends no filter of system calls")
    program = (
        "import ctypes\nc = ctypes.CDLL(None)\nassert c.fork() == -1 and c.socket(2, 1, 0) == -1"
    )
    assert run_code(program, None, Guards(False, True, False)).verdict == "passed"


def test_namespaces_keep_other_processes_to_themselves() -> None:
    """A secret in the environment of another process of the user's is out of reach; without them it is a
    file like any other."""
    if not available_guards().namespaces:
        pytest.skip("this machine lends no namespaces")
    program = (
        "import glob\nfor file in glob.glob('/proc/[0-9]*/environ'):\n"
        "    try:\n        found = b'SECRET_OF_THE_USER' in open(file, 'rb').read()\n"
        "    except OSError:\n        continue\n    assert not found"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
        env={**os.environ, "SECRET_OF_THE_USER": "x"},
    )  # fmt: skip
    try:
        assert run_code(program, None, Guards(True, False, False)).verdict == "passed"
        assert run_code(program, None, ONLY_PYTHON).verdict == "wrong"
    finally:
        other.communicate(b"\n")


def test_limits_are_checked() -> None:
    with pytest.raises(UserError, match="positive limits"):
        Limits(seconds=0)


def test_pass_at_k_counts_sets() -> None:
    """Against the definition: all sets of k programs, counted one by one."""
    outcomes = [[1, 0, 0, 1, 0], [0] * 5, [1] * 5, [0, 0, 0, 0, 1]]
    for k in (1, 2, 5):
        shares = [
            statistics.mean(any(s) for s in itertools.combinations(found, k)) for found in outcomes
        ]
        found = pass_at_k([sum(o) for o in outcomes], 5, k)
        assert found.value == pytest.approx(statistics.mean(shares))
        assert found.stderr == pytest.approx(statistics.stdev(shares) / 2)


def test_pass_at_k_refuses_too_few_programs() -> None:
    with pytest.raises(UserError, match="pass@3 needs at least 3"):
        pass_at_k([1], 2, 3)
