"""Typed options from the command line: tyro underneath, errors as one line."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr
from typing import Any, TypeVar

from xdlm.errors import UserError

T = TypeVar("T")


def parse(
    cls: type[T], arguments: list[str], *, prog: str, description: str, default: T | None = None
) -> T:
    """Fill a dataclass from `--flags`; nested fields are dotted. `--help` prints them all."""
    try:
        import tyro
    except ImportError as error:
        raise UserError("the command line needs tyro: pip install tyro") from error
    complaint = io.StringIO()
    try:
        with redirect_stderr(complaint):
            if default is None:
                return tyro.cli(cls, args=arguments, prog=prog, description=description)
            return tyro.cli(
                cls, args=arguments, prog=prog, description=description, default=default,
                config=(tyro.conf.AvoidSubcommands,),  # of several kinds, that of the default
            )  # fmt: skip
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(one_line(complaint.getvalue())) from stop


def positional() -> Any:
    """Marks an option that needs no flag. Annotations are only looked at by tyro, once it is there."""
    from tyro.conf import Positional

    return Positional


def named(flag: str) -> Any:
    """Gives an option a flag that Python would not have as a name."""
    from tyro.conf import arg

    return arg(name=flag)


def one_line(complaint: str) -> str:
    """The gist of tyro's boxed message: what is wrong, and the near miss if it names one."""
    lines = [line.strip("│╭╮╰╯─ ").strip() for line in complaint.splitlines()]
    body = [line for line in lines[1:] if line]
    blank = next((i for i, line in enumerate(lines) if i > 0 and not line), len(lines))
    gist = " ".join(line for line in lines[1:blank] if line) or " ".join(body)
    close = re.search(r"Perhaps you meant:?\s*(--\S+)", " ".join(body))
    return f"{gist}; did you mean '{close[1]}'?" if close else f"{gist}; see --help"
