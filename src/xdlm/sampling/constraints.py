"""What a blank may hold: texts that a pattern describes, in exactly as many tokens as the blank has.

Given what the model thinks of each position on its own, w_i(e), a blank is drawn from

    p(e_1 ... e_n)  proportional to  w_1(e_1) ... w_n(e_n) [e_1 ... e_n spells what the pattern describes]

exactly: backward sums over the states of an automaton, then a draw from left to right. A reverse step with
such a draw as the clean text, q(z_s | z_t, x), honours the pattern under every noise: the last step ends at
x itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.ops import categorical
from xdlm.sampling.filters import Filter
from xdlm.sampling.patterns import Pattern, State

#: States times tokens of an automaton's table, four bytes each.
MAX_TABLE = 16_000_000
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
        """[n + 1, S]: from each state that can be reached at each position, the weight of all that may
        follow, up to a factor for each position. Others are left out, since the factor is the largest:
        beside one that is never come to, all that matter might be rounded to 0."""
        *reached, last = self._reached(weights)
        after = self.accepts.to(weights) * last
        sums = [after]
        for weight, here in zip(weights.flip(0), reversed(reached), strict=True):
            after = (after[self.table] @ weight) * here
            after = after / after.max().clamp_min(torch.finfo(after.dtype).tiny)
            sums.append(after)
        return torch.stack(sums[::-1])

    def _reached(self, weights: Tensor) -> Iterator[Tensor]:
        """[S] for each of n + 1 positions: where a text of so many tokens may have led to."""
        here = torch.zeros(len(self.table), dtype=torch.bool)
        here[0] = True
        yield here
        for weight in weights:
            after = self.table[here][:, weight.cpu() > 0].unique().long()
            here = torch.zeros_like(here).scatter_(0, after, True)
            yield here

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


@dataclass
class _Node:
    """The tokens that begin alike: those that are spelled so far, and how spellings go on."""

    tokens: list[int] = field(default_factory=list)
    then: dict[str, _Node] = field(default_factory=dict)


def compile_pattern(
    pattern: Pattern,
    spellings: Sequence[str],
    forbidden: Collection[int],
    *,
    on_state: Callable[[], None] | None = None,
) -> Automaton:
    """The automaton over tokens of such spellings; those in `forbidden`, and those that are part of a
    character, spell nothing. One space in front is free, since tokens carry the space before a word.
    `on_state` is called for each of its states, and may raise to stop."""
    root, size = _by_spelling(spellings, forbidden), len(spellings)
    numbers: dict[tuple[State, bool], int] = {(pattern.start, True): 0}
    rows: list[Tensor] = []
    todo = deque(numbers)
    while todo:
        state, first = todo.popleft()
        if on_state is not None:
            on_state()
        found: dict[int, State] = dict(_spelled(pattern, state, root))
        if first and " " in root.then:
            for token, after in _spelled(pattern, state, root.then[" "]):
                found[token] = found.get(token, frozenset()) | after
        row = torch.full((size,), -1, dtype=torch.int32)
        for token, after in found.items():
            key = after, False
            if key not in numbers:
                numbers[key] = len(numbers)
                todo.append(key)
                if len(numbers) * size > MAX_TABLE:
                    raise UserError("the regular expression or list of choices is too large")
            row[token] = numbers[key]
        rows.append(row)
    rows.append(torch.full((size,), -1, dtype=torch.int32))
    table = torch.stack(rows)
    accepts = [pattern.accepts(state) for state, _ in numbers]
    return Automaton(table.masked_fill_(table < 0, len(rows) - 1), torch.tensor([*accepts, False]))


def _by_spelling(spellings: Sequence[str], forbidden: Collection[int]) -> _Node:
    root = _Node()
    for token, text in enumerate(spellings):
        if not text or "\ufffd" in text or token in forbidden:
            continue
        node = root
        for character in text:
            node = node.then.setdefault(character, _Node())
        node.tokens.append(token)
    return root


def _spelled(pattern: Pattern, state: State, root: _Node) -> Iterator[tuple[int, State]]:
    """Tokens below a node that may be written in a state, and the states that they lead to."""
    todo = [(root, state)]
    while todo:
        node, here = todo.pop()
        for token in node.tokens:
            yield token, here
        for character, child in node.then.items():
            if after := pattern.step(here, character):
                todo.append((child, after))


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
