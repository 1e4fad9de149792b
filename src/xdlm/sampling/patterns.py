"""Regular expressions as automata over characters.

The syntax is Python's, and so is the parser; what a finite automaton cannot do (look-around, references to
groups, anchors inside) is refused. A pattern describes the whole of a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from xdlm.errors import UserError

#: Nodes of an automaton: counted repetition multiplies them.
MAX_NODES = 20_000
_KINDS = {
    "CATEGORY_DIGIT": r"\d", "CATEGORY_NOT_DIGIT": r"\D", "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S", "CATEGORY_WORD": r"\w", "CATEGORY_NOT_WORD": r"\W",
}  # fmt: skip

State = frozenset[int]
Test = Callable[[str], bool]


class Pattern:
    """A nondeterministic automaton; a state is the set of nodes that the text so far may have led to."""

    def __init__(self, expression: str) -> None:
        self._edges: list[list[tuple[Test, int]]] = []
        self._free: list[list[int]] = []
        self._steps: dict[tuple[State, str], State] = {}
        start, self._end = self._node(), self._node()
        try:
            re.compile(expression)
            parsed = import_module("re._parser").parse(expression)
            self._sequence(list(parsed), start, self._end, first=True, last=True)
        except (re.error, RecursionError, OverflowError) as error:
            raise UserError(f"'{expression}' is no regular expression: {error}") from error
        if parsed.state.flags & (re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE):
            raise UserError(f"flags such as (?i) are not supported, in '{expression}'")
        self.start = self._closure([start])

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> Pattern:
        """One of some texts, as they are."""
        return cls("|".join(map(re.escape, choices)))

    def accepts(self, state: State) -> bool:
        return self._end in state

    def step(self, state: State, character: str) -> State:
        """The state after one more character; the empty set if no text begins like that."""
        key = state, character
        if key not in self._steps:
            found = (to for node in state for test, to in self._edges[node] if test(character))
            self._steps[key] = self._closure(found)
        return self._steps[key]

    def _closure(self, nodes: Iterable[int]) -> State:
        found, todo = set[int](), list(nodes)
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += self._free[node]
        return frozenset(found)

    def _node(self) -> int:
        if len(self._edges) >= MAX_NODES:
            raise UserError("the regular expression or list of choices is too large")
        self._edges.append([])
        self._free.append([])
        return len(self._edges) - 1

    def _sequence(
        self, items: Sequence[Any], start: int, end: int, *, first: bool = False, last: bool = False
    ) -> None:
        """From node to node; `first` and `last` where the text begins before it or ends behind it. Anchors
        there say nothing new: a pattern describes the whole text in any case."""
        while first and items and _is_anchor(items[0], "AT_BEGINNING", "AT_BEGINNING_STRING"):
            items = items[1:]
        while last and items and _is_anchor(items[-1], "AT_END", "AT_END_STRING"):
            items = items[:-1]
        for i, (op, argument) in enumerate(items):
            after = self._node()
            begins, ends = first and i == 0, last and i == len(items) - 1
            self._item(str(op), argument, start, after, first=begins, last=ends)
            start = after
        self._free[start].append(end)

    def _item(
        self, name: str, argument: Any, start: int, end: int, *, first: bool, last: bool
    ) -> None:
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            self._edges[start].append((_test(name, argument), end))
        elif name == "BRANCH":
            for option in argument[1]:
                self._sequence(list(option), start, end, first=first, last=last)
        elif name == "SUBPATTERN":
            _, added, removed, inner = argument
            if added or removed:
                raise UserError("flags such as (?i:...) are not supported in a pattern")
            self._sequence(list(inner), start, end, first=first, last=last)
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            if name == "POSSESSIVE_REPEAT":
                raise UserError("possessive repetition is not supported in a pattern")
            least, most, items = argument
            self._repeat(least, most, items, start, end)
        elif name == "AT":
            raise UserError("anchors inside a pattern are not supported: it is the whole text")
        else:
            raise UserError(
                f"{name.lower().replace('_', ' ')} is not supported in a pattern: only characters, "
                "classes, groups, | and repetition"
            )

    def _repeat(self, least: int, most: Any, items: Any, start: int, end: int) -> None:
        for _ in range(least):
            after = self._node()
            self._sequence(list(items), start, after)
            start = after
        if str(most) == "MAXREPEAT":
            # Around a node of its own: what comes before must not be repeated with it.
            loop = self._node()
            self._free[start].append(loop)
            self._sequence(list(items), loop, loop)
            self._free[loop].append(end)
            return
        for _ in range(most - least):
            self._free[start].append(end)
            after = self._node()
            self._sequence(list(items), start, after)
            start = after
        self._free[start].append(end)


def _is_anchor(item: tuple[Any, Any], *kinds: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in kinds


def _test(name: str, argument: Any) -> Test:
    """Whether a character is meant."""
    if name == "ANY":
        return lambda c: c != "\n"
    if name == "LITERAL":
        return lambda c: ord(c) == argument
    if name == "NOT_LITERAL":
        return lambda c: ord(c) != argument
    if name == "RANGE":
        return lambda c: argument[0] <= ord(c) <= argument[1]
    if name == "CATEGORY":
        kind = re.compile(_KINDS[str(argument)])
        return lambda c: kind.fullmatch(c) is not None
    negated = str(argument[0][0]) == "NEGATE"
    tests = [_test(str(op), inner) for op, inner in argument[negated:]]
    return lambda c: any(test(c) for test in tests) != negated
