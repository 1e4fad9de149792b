"""Templates for infilling: text with holes."""

from __future__ import annotations

import re
from typing import NamedTuple

from xdlm.errors import UserError

MAX_HOLE = 100_000
_HOLE = re.compile(r"<mask(?::(\d{1,12}))?>")
#: All that somebody may have meant as a hole: a slip in writing one is not kept as text. An element of
#: SVG, `<mask id="a">`, is.
_LIKE_A_HOLE = re.compile(r"<mask\s*(?::[^>]*|[\d\s]*)>", re.IGNORECASE)
#: Characters of a slip that an error shows: one that is closed late goes on for pages.
_SHOWN = 40


class Piece(NamedTuple):
    """A stretch of a template: text to keep, or a hole of so many tokens."""

    text: str
    hole: int


def parse_template(template: str) -> list[Piece]:
    """`"The <mask:12> sat."` as pieces; `<mask>` is a hole of one token.

    A space before a hole belongs to the hole: tokens carry the space in front of them, so a text
    that ends in a lone space would look to the model like nothing that it has seen.
    """
    pieces, end = [], 0
    for match in _LIKE_A_HOLE.finditer(template):
        if match.start() > end:
            text = template[end : match.start()].removesuffix(" ")
            if text:
                pieces.append(Piece(text, 0))
        pieces.append(Piece("", _size(match[0])))
        end = match.end()
    if end < len(template):
        pieces.append(Piece(template[end:], 0))
    if not any(piece.hole for piece in pieces):
        raise UserError(
            "the template has no hole: write <mask:8> where 8 tokens are to be filled in"
        )
    return pieces


def _size(hole: str) -> int:
    """Tokens of a hole as it stands in a template."""
    match = _HOLE.fullmatch(hole)
    if match is None:
        shown = hole if len(hole) <= _SHOWN else f"{hole[:_SHOWN]}..."
        raise UserError(f"{shown!r} is no hole: write <mask:8> for 8 tokens, or <mask> for one")
    size = int(match[1] or 1)
    if not 1 <= size <= MAX_HOLE:
        raise UserError(f"a hole must have 1 to {MAX_HOLE:,} tokens, got '{hole}'")
    return size
