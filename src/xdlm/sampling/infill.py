"""Templates for infilling: text with holes."""

from __future__ import annotations

import re
from typing import NamedTuple

from xdlm.errors import UserError

MAX_HOLE = 100_000
_HOLE = re.compile(r"<mask(?::(\d+))?>")


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
    for match in _HOLE.finditer(template):
        if match.start() > end:
            text = template[end : match.start()].removesuffix(" ")
            if text:
                pieces.append(Piece(text, 0))
        size = int(match[1]) if match[1] is not None else 1
        if not 1 <= size <= MAX_HOLE:
            raise UserError(f"a hole must have 1 to {MAX_HOLE:,} tokens, got '{match[0]}'")
        pieces.append(Piece("", size))
        end = match.end()
    if end < len(template):
        pieces.append(Piece(template[end:], 0))
    if not any(piece.hole for piece in pieces):
        raise UserError(
            "the template has no hole: write <mask:8> where 8 tokens are to be filled in"
        )
    return pieces
