"""What `--help` says of options: the docstrings below the fields of dataclasses, as paragraphs."""

from __future__ import annotations

import dataclasses
import io
import shutil
import sys
import textwrap
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

#: What `tidy` has seen to.
_TIDY: set[type] = set()


def tidy(cls: type) -> None:
    """Tell tyro what to show of a dataclass and of those inside it. By itself it breaks a text wherever its
    source does, and shows None as a value to choose and as a default where the text says what happens."""
    import tyro
    from docstring_parser import parse_from_object

    if cls in _TIDY:
        return
    _TIDY.add(cls)
    hints = get_type_hints(cls, include_extras=True)
    said = {each.arg_name: each.description for each in parse_from_object(cls).params}
    given = {field.name for field in dataclasses.fields(cls) if field.default is not None}
    own = vars(cls).get("__annotations__", {})
    for name in own.keys() & said.keys():
        text = " ".join((said[name] or "").split())
        shown = tyro.conf.arg(
            help=text,
            metavar=None if name in given else _metavar(hints[name]),
            help_behavior_hint=_default,
        )
        own[name] = Annotated[hints[name], shown]
    for part in (*cls.__mro__, *hints.values()):
        for inner in _dataclasses_in(part):
            tidy(inner)


class Help(io.StringIO):
    """Text that is to be printed where standard output goes, in its colours and letters."""

    encoding = property(lambda self: getattr(sys.__stdout__, "encoding", "utf-8"))

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def wrapped(shown: str) -> str:
    """A description comes as one line for each paragraph; examples and options are as they should be."""
    width = max(20, shutil.get_terminal_size().columns)
    return "\n".join(
        textwrap.fill(line, width, break_on_hyphens=False)
        if line[:1] not in (" ", "│", "╭", "╰") and "\x1b" not in line
        else line
        for line in shown.split("\n")
    )


def _default(value: str) -> str:
    return f"(default: {value})" if value not in ("None", "") else ""


def _metavar(hint: Any) -> str | None:
    """Of what may be left out: how one writes it if one does not. None leaves that to tyro."""
    if get_origin(hint) is Annotated:
        return None
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    given = [kind for kind in kinds if kind is not NoneType]
    if len(given) != 1 or len(kinds) != 2:
        return None
    if get_origin(given[0]) is Literal:
        return "{" + ",".join(map(str, get_args(given[0]))) + "}"
    return given[0].__name__.upper() if given[0] in (int, float, str) else None


def _dataclasses_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _dataclasses_in(part)
