"""Templates as rows of tokens, and what may be written in them, in terms of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from xdlm.errors import UserError
from xdlm.sampling import parse_template
from xdlm.sampling.constraints import Automaton, Blank, Rules, check_fits, compile_pattern
from xdlm.sampling.patterns import Pattern
from xdlm.tokens import TextTokenizer

Encode = Callable[[str], list[int]]


class Blanked(NamedTuple):
    """A row with holes (None), and the positions of each hole of the template that it came from."""

    ids: list[int | None]
    holes: list[tuple[int, ...]]


@dataclass(frozen=True)
class BlankRule:
    """What one hole may hold: one of some texts, or what a regular expression describes."""

    choices: Sequence[str] | None = None
    regex: str | None = None

    @property
    def name(self) -> str:
        return "any of its choices" if self.regex is None else "what its regex describes"

    def pattern(self) -> Pattern:
        if self.choices is not None and self.regex is None:
            if isinstance(self.choices, str) or not self.choices:
                raise UserError(f"choices takes a list of texts, got {self.choices!r}")
            return Pattern.of_choices(self.choices)
        if self.regex is not None and self.choices is None:
            return Pattern(self.regex)
        raise UserError("a blank takes either choices or a regex")


#: From a rule, the tokens that are forbidden and how many the hole has.
Compiled = Callable[[BlankRule, frozenset[int], int], Automaton]


def read_template(template: str, encode: Encode, *, max_length: int) -> Blanked:
    """Text with holes `<mask:12>` as a row."""
    ids: list[int | None] = []
    holes = []
    for piece in parse_template(template):
        if piece.hole > max_length:
            raise UserError(f"at most {max_length:,} tokens at once, got a hole of {piece.hole:,}")
        if piece.hole:
            holes.append(tuple(range(len(ids), len(ids) + piece.hole)))
            ids += [None] * piece.hole
        else:
            ids += encode(piece.text)
    return Blanked(ids, holes)


def force(
    ids: Sequence[int | None], forced: Mapping[int, int | str], encode: Encode
) -> list[int | None]:
    """The row with tokens put into holes, by position."""
    filled = list(ids)
    for where, token in forced.items():
        if not (0 <= where < len(ids) and ids[where] is None):
            raise UserError(f"forced position {where} is not in a hole")
        filled[where] = one_token(token, encode)
    return filled


def make_rules(
    holes: Sequence[tuple[int, ...]],
    tokenizer: TextTokenizer,
    size: int,
    encode: Encode,
    *,
    banned: Sequence[int | str] = (),
    blanks: Sequence[BlankRule | None] = (),
    compiled: Compiled | None = None,
) -> Rules:
    """What the holes of a row may hold, over a vocabulary of so many tokens; what cannot be met is an
    error. `compiled` stands in for `compile_rule`, for those who keep what was compiled, or bound it."""
    for name, given in (("banned", banned), ("blanks", blanks)):
        if isinstance(given, str | BlankRule):
            raise UserError(f"{name} takes a list, got {given!r}")
    if len(blanks) > len(holes):
        raise UserError(f"{len(blanks)} rules for {len(holes)} blanks")
    ids = tuple(one_token(token, encode) for token in banned)
    made = []
    for hole, rule in zip(holes, blanks, strict=False):
        if rule is None:
            continue
        forbidden = frozenset({*ids, tokenizer.eos_id})
        if compiled is None:
            automaton = compile_rule(rule, tokenizer, size, forbidden)
        else:
            automaton = compiled(rule, forbidden, len(hole))
        check_fits(automaton, len(hole), rule.name)
        made.append(Blank(hole, automaton))
    return Rules(ids, tuple(made))


def compile_rule(
    rule: BlankRule,
    tokenizer: TextTokenizer,
    size: int,
    forbidden: frozenset[int],
    on_state: Callable[[], None] | None = None,
) -> Automaton:
    """Over a vocabulary of so many tokens; `on_state` may raise to stop it."""
    spellings = _spellings(tokenizer, size)
    return compile_pattern(rule.pattern(), spellings, forbidden, on_state=on_state)


def one_token(token: int | str, encode: Encode) -> int:
    """A token by its number, or by a text that is one token."""
    if isinstance(token, int):
        return token
    ids = encode(token)
    if len(ids) != 1:
        raise UserError(f"{token!r} is {len(ids)} tokens, not one; give token numbers")
    return ids[0]


@lru_cache(maxsize=4)
def _spellings(tokenizer: TextTokenizer, size: int) -> list[str]:
    """The text of every token: of no use to most, so not before somebody asks."""
    return tokenizer.pieces(range(size))
