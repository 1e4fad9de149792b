"""Typed options from the command line: tyro underneath, errors as one line."""

from __future__ import annotations

import io
import operator
import re
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from itertools import dropwhile, takewhile
from textwrap import dedent
from typing import Any, TypeVar

from xdlm.cli.helptext import Help, tidy, wrapped
from xdlm.errors import UserError

T = TypeVar("T")

#: What tyro, and Python below it, say of a value -> what is said here.
_REWORDED = {
    r"Error parsing (--\S+): invalid literal for int\(\) .*: ('.*')": r"\1 takes a whole number, got \2",
    r"Error parsing (--\S+): could not convert string to float: ('.*')": r"\1 takes a number, got \2",
    r"Error parsing (--\S+): Could not find valid parse for arguments: \[(.*)\]": r"\1 cannot be \2",
    r"Error parsing [^-\s]\S*: (.*)": r"\1",  # a configuration's own words
    r"invalid choice (.*) for argument '(.*)'\. Expected one of \((.*)\)\.": r"\2 takes one of \3, got \1",
    r"Missing value for argument '(.*)'\. .*": r"\1 needs a value",
}


def parse(
    cls: type[T], arguments: list[str], *, prog: str, description: str, default: T | None = None
) -> T:
    """Fill a dataclass from `--flags`; nested fields are dotted. `--help` prints them all."""
    try:
        import tyro
    except ImportError as error:
        raise UserError("the command line needs tyro: pip install tyro") from error
    tidy(cls)
    # Of several kinds, that of the default.
    more: dict[str, Any] = {}
    if default is not None:
        more = {"default": default, "config": (tyro.conf.AvoidSubcommands,)}

    def read(words: list[str]) -> T:
        return tyro.cli(cls, args=words, prog=prog, description=description, **more)

    shown, complaint = Help(), io.StringIO()  # tyro draws boxes
    try:
        with redirect_stdout(shown), redirect_stderr(complaint):
            return read(arguments)
    except SystemExit as stop:
        if stop.code in (0, None):
            print(wrapped(shown.getvalue()), end="")
            raise
        said = complaint.getvalue()
    # It knows what was meant by `--stepz 4`, but not by `--stepz=4`.
    if "Unrecognized options" in said:
        apart = [word for each in arguments for word in _value_apart(each)]
        with redirect_stderr(again := io.StringIO()), suppress(SystemExit):
            read(apart)
        said = again.getvalue() or said
    raise UserError(one_line(said))


def _value_apart(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") else [word]


def positional() -> Any:
    """Marks an option that needs no flag. Annotations are only looked at by tyro, once it is there."""
    from tyro.conf import Positional

    return Positional


def named(flag: str) -> Any:
    """Gives an option a flag that Python would not have as a name."""
    from tyro.conf import arg

    return arg(name=flag)


def shown_as(metavar: str) -> Any:
    """What stands in --help for the value of an option."""
    from tyro.conf import arg

    return arg(metavar=metavar)


def one_line(complaint: str) -> str:
    """The gist of tyro's boxed message: what is wrong, and the near miss if it names one."""
    lines = [line.strip("│╭╮╰╯").rstrip("─- ") for line in complaint.splitlines()]
    below_title = dropwhile(
        operator.not_, lines[1:]
    )  # there is a rule where the screen has no boxes
    said = dedent("\n".join(takewhile(bool, below_title)))
    gist = " ".join(said.split())
    if gist.startswith("Missing from"):
        missing = re.findall(r"^ {4}(\S+)", said, re.MULTILINE)
        return f"{' and '.join(missing)} must be given; see --help"
    if close := _near_miss(gist, lines):
        return f"{gist}; did you mean '{close}'?"
    for pattern, words in _REWORDED.items():
        if match := re.fullmatch(pattern, gist):
            return match.expand(words)
    return f"{gist}; see --help"


def _near_miss(gist: str, lines: Sequence[str]) -> str | None:
    """The flag that tyro thinks was meant. A switch, which it shows as `--stop, --no-stop`, was not if a
    value was given."""
    wrong = re.search(r"(--[^\s,]+)(, (?!--))?", gist)
    told = "\n".join(lines).partition("Perhaps you meant:\n")[2]
    offered = re.findall(r"^ {4,6}(--.*)", told, re.MULTILINE)  # what they do stands further in
    if wrong is None or not offered:
        return None
    with_value = [line for line in offered if not re.search(r", --(\S+\.)?no-", line)]
    best = (with_value or offered)[0] if wrong[2] else offered[0]
    flags = re.findall(r"--[^\s,]+", best)
    return get_close_matches(wrong[1], flags, n=1, cutoff=0)[0]
