"""Patterns of requests as automata: bounded for each request, and the latest kept."""

from __future__ import annotations

import threading

from xdlm.blanks import BlankRule, Compiled, compile_rule
from xdlm.errors import UserError
from xdlm.sampling.constraints import MAX_TABLE, Automaton
from xdlm.serve.workers import Check
from xdlm.tokens import TextTokenizer

#: Entries of tables that all patterns of a request may have together, and that are kept for the next.
_ENTRIES = MAX_TABLE
#: Entries that a step of all texts of a request may look at: those of a table, for every token of its hole.
MAX_LOOKED_AT = 100_000_000

_Key = tuple[tuple[str, ...] | None, str | None, frozenset[int]]


class Automata:
    """Of one model's tokens."""

    def __init__(self, tokenizer: TextTokenizer, size: int) -> None:
        self.tokenizer, self.size = tokenizer, size
        self._kept: dict[_Key, Automaton] = {}
        self._lock = threading.Lock()

    def compiler(self, *, n: int, check: Check) -> Compiled:
        """For the blanks of one request of `n` texts; `check` is called often, and raises to stop it."""
        own: dict[_Key, Automaton] = {}
        looked_at = 0

        def compiled(rule: BlankRule, forbidden: frozenset[int], length: int) -> Automaton:
            nonlocal looked_at
            choices = None if rule.choices is None else tuple(rule.choices)
            key = choices, rule.regex, forbidden
            entries = sum(one.table.numel() for one in own.values())

            def on_state() -> None:
                nonlocal entries
                check()
                entries += self.size
                if entries > _ENTRIES:
                    raise UserError("the patterns of all blanks together are too large")

            if key not in own:
                automaton = self._find(key)
                if automaton is None:
                    automaton = compile_rule(rule, self.tokenizer, self.size, forbidden, on_state)
                    self._keep(key, automaton)
                elif entries + automaton.table.numel() > _ENTRIES + self.size:
                    raise UserError("the patterns of all blanks together are too large")
                own[key] = automaton
            looked_at += n * length * own[key].table.numel()
            if looked_at > MAX_LOOKED_AT:
                raise UserError(
                    "the patterns are too large for blanks of so many tokens, so many times"
                )
            return own[key]

        return compiled

    def _find(self, key: _Key) -> Automaton | None:
        """And put it last."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is not None:
                self._kept[key] = found
            return found

    def _keep(self, key: _Key, automaton: Automaton) -> None:
        with self._lock:
            self._kept[key] = automaton
            while sum(one.table.numel() for one in self._kept.values()) > _ENTRIES:
                self._kept.pop(next(iter(self._kept)))
