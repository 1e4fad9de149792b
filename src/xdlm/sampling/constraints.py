"""What a blank may hold: texts that a pattern describes, in exactly as many tokens as the blank has.

Given what the model thinks of each position on its own, w_i(e), a blank is drawn from

    p(e_1 ... e_n)  proportional to  w_1(e_1) ... w_n(e_n) [e_1 ... e_n spells what the pattern describes]

exactly: backward sums over the states of an automaton, then a draw from left to right. A reverse step with
such a draw as the clean text, q(z_s | z_t, x), honours the pattern under every noise: the last step ends at
x itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.ops import categorical
from xdlm.sampling.filters import Filter
from xdlm.sampling.patterns import Pattern, State

#: States times tokens of an automaton's table.
MAX_TABLE = 100_000_000
#: Lengths that are tried, to say which would do.
_LENGTHS = 64


@dataclass(frozen=True, eq=False)
class Automaton:
    """`table` [S, V] is the state after a token, the last state (S - 1) one that leads nowhere; `accepts`
    [S] where a text may end. It begins in state 0."""

    table: Tensor
    accepts: Tensor

    def lengths(self) -> list[int]:
        """Numbers of tokens, up to a bound, in which some text can be spelled."""
        dead = len(self.table) - 1
        reached, found = {0}, []
        leads_to = [set(row.unique().tolist()) - {dead} for row in self.table]
        for length in range(1, _LENGTHS + 1):
            reached = {after for state in reached for after in leads_to[state]}
            if any(bool(self.accepts[state]) for state in reached):
                found.append(length)
        return found

    def fits(self, length: int) -> bool:
        """Whether some text can be spelled in so many tokens."""
        alive = torch.ones(length, self.table.shape[1], dtype=torch.float64)
        return bool(self.backward(alive)[0, 0] > 0)

    def backward(self, weights: Tensor) -> Tensor:
        """[n + 1, S]: from each state at each position, the weight of all that may follow, up to a factor
        for each position."""
        after = self.accepts.to(weights)
        sums = [after]
        for weight in weights.flip(0):
            after = after[self.table] @ weight
            after = after / after.max().clamp_min(torch.finfo(after.dtype).tiny)
            sums.append(after)
        return torch.stack(sums[::-1])

    def draw(self, weights: Tensor, uniform: Tensor, reshape: Filter) -> Tensor:
        """Tokens [n] by `weights` [n, V] and one number in [0, 1) for each. Temperature 0 and nucleus act
        on what is left at each position, from left to right."""
        sums, state, tokens = self.backward(weights), 0, []
        last = Filter(0.0 if reshape.temperature == 0 else 1.0, reshape.top_p)
        for weight, later, number in zip(weights, sums[1:], uniform, strict=True):
            law = last((weight * later[self.table[state]]).log()[None])
            token = int(categorical(law, number[None])[0])
            tokens.append(token)
            state = int(self.table[state, token])
        return torch.tensor(tokens, device=weights.device)


def compile_pattern(
    pattern: Pattern, spellings: Sequence[str], forbidden: Collection[int]
) -> Automaton:
    """The automaton over tokens of such spellings; those in `forbidden`, and those that are part of a
    character, spell nothing. One space in front is free, since tokens carry the space before a word."""
    words = [
        (i, text) for i, text in enumerate(spellings)
        if text and "\ufffd" not in text and i not in forbidden
    ]  # fmt: skip
    size = len(spellings)
    dead: State = frozenset()
    numbers: dict[tuple[State, bool], int] = {(pattern.start, True): 0}
    rows: list[Tensor] = []
    todo = deque(numbers)
    while todo:
        state, first = todo.popleft()
        row = torch.full((size,), -1, dtype=torch.int64)
        for token, text in words:
            after = _after(pattern, state, text)
            if first and text.startswith(" "):
                after |= _after(pattern, state, text[1:])
            if after == dead:
                continue
            key = after, False
            if key not in numbers:
                numbers[key] = len(numbers)
                todo.append(key)
                if len(numbers) * size > MAX_TABLE:
                    raise UserError("the regular expression or list of choices is too large")
            row[token] = numbers[key]
        rows.append(row)
    rows.append(torch.full((size,), -1, dtype=torch.int64))
    table = torch.stack(rows)
    accepts = [pattern.accepts(state) for state, _ in numbers]
    return Automaton(torch.where(table < 0, len(rows) - 1, table), torch.tensor([*accepts, False]))


def _after(pattern: Pattern, state: State, text: str) -> State:
    for character in text:
        state = pattern.step(state, character)
        if not state:
            break
    return state


@dataclass(frozen=True, eq=False)
class Blank:
    """Positions that must spell, together, what an automaton accepts."""

    positions: tuple[int, ...]
    automaton: Automaton


@dataclass(frozen=True, eq=False)
class Rules:
    """What a row may hold: tokens that are never written, and blanks with patterns."""

    banned: tuple[int, ...] = ()
    blanks: tuple[Blank, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.banned or self.blanks)

    @property
    def positions(self) -> list[int]:
        return [position for blank in self.blanks for position in blank.positions]


def check_fits(automaton: Automaton, length: int, what: str) -> None:
    """That a blank of so many tokens can be filled."""
    if automaton.fits(length):
        return
    lengths = automaton.lengths()
    hint = "no number of tokens can" if not lengths else f"it takes {_listed(lengths)}"
    raise UserError(f"a blank of {length} tokens cannot hold {what}: {hint}")


def _listed(lengths: Sequence[int]) -> str:
    if len(lengths) > 2 and lengths == list(range(lengths[0], lengths[-1] + 1)):
        return f"{lengths[0]} to {lengths[-1]}" + (" or more" if lengths[-1] == _LENGTHS else "")
    return ", ".join(map(str, lengths[:12]))
