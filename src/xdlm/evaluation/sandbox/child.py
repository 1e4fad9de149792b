"""The inside of the sandbox: a script of its own, which takes a job from standard input, shuts itself in,
runs the program and writes a verdict.

It imports nothing but the standard library, and runs as `python -I -S child.py FD`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20


def main() -> None:
    job = json.load(sys.stdin)
    report = int(sys.argv[1])

    def tell(verdict: str, why: str = "") -> None:
        """The nonce is what the program does not know: it cannot give its own verdict, unless it searches
        the interpreter for it."""
        os.write(report, json.dumps([job["nonce"], verdict, why[:500]]).encode())

    try:
        if job["namespaces"]:
            enter_namespaces(job["scratch"], job["file_mb"])
        os.chdir(job["scratch"])
        limit_resources(job)
        if job["seccomp"]:
            filter_calls()
        if job["hook"]:
            sys.addaudithook(guard(job["scratch"]))
    except OSError as error:
        tell("unguarded", str(error))
        return
    tell(*outcome(job["program"]))
    os._exit(0)  # whatever threads the program has left


def outcome(program: str) -> tuple[str, str]:
    """Passed, wrong (an assertion does not hold) or failed (anything else, leaving early included)."""
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
    except AssertionError as error:
        return "wrong", f"AssertionError: {error}"
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""


def limit_resources(job: dict[str, Any]) -> None:
    """Of each process; where none can be forked there is just one."""
    seconds = int(job["seconds"]) + 1
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, job["memory_mb"] * MIB),
        (resource.RLIMIT_FSIZE, job["file_mb"] * MIB),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 1024),  # of the user's in all; the kernel does not hold root to it
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error of the write, not a kill


# --- Namespaces: a user, a network, processes and mounts of its own -----------------------------------

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _RDONLY = 442, -100, 0x8000, 1
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 0x4000, 0x40000


def libc() -> Any:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    import ctypes

    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def enter_namespaces(scratch: str, file_mb: int) -> None:
    """No network but an unconfigured loopback, no process to be killed or looked into but its own (/proc
    still lists the others), every mount read-only except a small file system in memory over the scratch
    folder; then no capabilities."""
    import ctypes
    import struct

    c, uid, gid = libc(), os.getuid(), os.getgid()
    checked(c.unshare(_NEWUSER | _NEWNS | _NEWIPC | _NEWPID | _NEWNET), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    inside = os.fork()  # the first of the new processes: with it all others die
    if inside:
        os.waitpid(inside, 0)
        os._exit(0)
    checked(c.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    checked(c.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "private mounts")
    read_only = ctypes.create_string_buffer(struct.pack("QQQQ", _RDONLY, 0, 0, 0))
    done = c.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, 32)
    checked(done, "read-only mounts")
    room = f"size={4 * file_mb}m,nr_inodes=4096,mode=700".encode()
    done = c.mount(b"scratch", os.fsencode(scratch), b"tmpfs", _MS_NOSUID | _MS_NODEV, room)
    checked(done, "a scratch file system")
    checked(c.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    checked(c.capset(header, ctypes.create_string_buffer(24)), "capset")


# --- A filter of system calls ---------------------------------------------------------------------------

_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD = 0x10000
#: By machine: how the kernel calls the architecture, the number of `clone`, numbers that are refused (fork,
#: vfork, leaving the group that will be killed, socket, ptrace, mounts of all kinds, unshare, setns, the
#: memory and the descriptors of other processes) and numbers that are said not to be there (clone3,
#: io_uring).
MACHINES: dict[str, tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E, 56,
        (57, 58, 109, 112, 41, 101, 165, 166, 272, 308, 428, 429, 430, 431, 432, 442, 310, 311, 434, 424),
        (435, 425),
    ),
    "aarch64": (
        0xC00000B7, 220,
        (154, 157, 198, 117, 40, 39, 97, 268, 428, 429, 430, 431, 432, 442, 270, 271, 434, 424),
        (435, 425),
    ),
}  # fmt: skip


def filter_calls() -> None:
    """Refuse new processes (threads may be) and sockets, for good and whatever language asks for them."""
    import ctypes
    import struct

    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"no filter of system calls for {machine}")
    rules = assembled(*MACHINES[machine])
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code)
    at = ctypes.addressof(buffer)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), at))
    c = libc()
    checked(c.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    checked(c.prctl(_PR_SET_SECCOMP, 2, program, 0, 0), "seccomp")


def assembled(
    arch: int, clone: int, refused: tuple[int, ...], absent: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """Instructions of the kernel's filter: (code, jump if so, jump if not, operand)."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x50000
    rules = [
        (load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill),
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, refuse | _ENOSYS),
    ]  # fmt: skip
    for numbers, error in ((refused, _EPERM), (absent, _ENOSYS)):
        for number in numbers:
            rules += [(equal, 0, 1, number), (give, 0, 0, refuse | error)]
    flags = [(load, 0, 0, 16), (any_bit, 1, 0, _CLONE_THREAD), (give, 0, 0, refuse | _EPERM)]
    return [*rules, (equal, 0, len(flags), clone), *flags, (give, 0, 0, allow)]


# --- A guard inside Python, where the kernel's are not to be had -----------------------------------------

_REFUSED = (
    "socket.", "subprocess.", "ctypes.", "pty.", "os.fork", "os.forkpty", "os.exec", "os.spawn",
    "os.posix_spawn", "os.system", "os.startfile", "os.kill", "os.killpg", "os.chroot",
    "signal.pthread_kill", "sys.addaudithook", "gc.get_referrers", "gc.get_objects", "code.__new__",
)  # fmt: skip
_CHANGING = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
    "os.chown", "os.utime", "os.setxattr", "os.removexattr", "os.chflags", "os.lockf", "shutil.",
    "sqlite3.connect", "os.mknod", "os.mkfifo",
)  # fmt: skip
_FORKING = "_posixsubprocess"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def guard(scratch: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Refuses what Python announces of sockets, processes, foreign code and changes of files outside the
    scratch folder. It stops accidents and plain malice, not somebody who knows the interpreter well."""
    root = os.path.realpath(scratch)
    realpath, isdir, fsdecode = os.path.realpath, os.path.isdir, os.fsdecode
    refuse_silent_forks()

    def is_inside(path: Any) -> bool:
        place = realpath(f"/proc/self/fd/{path}" if isinstance(path, int) else fsdecode(path))
        return place == root or place.startswith(root + "/")

    def changed(arguments: tuple[Any, ...]) -> list[Any]:
        """Paths among an event's arguments. The first may be a number: a file that is open, for reading
        perhaps, and has rights and times for all that."""
        paths = [each for each in arguments if isinstance(each, str | bytes | os.PathLike)]
        return [*paths, *(each for each in arguments[:1] if isinstance(each, int))]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED) or (event == "import" and arguments[0] == _FORKING):
            raise PermissionError(f"the sandbox refuses {event}")
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, int) or is_inside(path):  # a number is a file that is open already
                return
            # A folder that is open would let paths begin there, which nobody announces.
            if flags & _WRITING or (mode is None and isdir(path)):
                raise PermissionError(f"the sandbox refuses to open {path!r}")
        elif event.startswith(_CHANGING) and not all(map(is_inside, changed(arguments))):
            raise PermissionError(f"the sandbox refuses {event}")

    return hook


def refuse_silent_forks() -> None:
    """The one way to a new process that Python does not announce, under `subprocess`. That may be imported
    as before; to import its inside anew is refused."""
    import _posixsubprocess

    def refused(*_: Any) -> int:
        raise PermissionError("the sandbox refuses new processes")

    _posixsubprocess.fork_exec = refused


if __name__ == "__main__":
    main()
