"""Token text made fit to show: what is invisible or could act on a terminal becomes a sign."""

from __future__ import annotations

import unicodedata

_SIGNS = {"\n": "↵", "\t": "⇥", "\x7f": "␡"}
#: Controls, formatting such as right-to-left override, surrogates, line and paragraph separators.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
#: The two joiners are part of how some scripts and emoji are written.
_JOINERS = "\u200c\u200d"


def visible(piece: str) -> str:
    """The text of one token with every character on show; a token without text is `∅`."""
    return "".join(map(_visible_character, piece)) or "∅"


def _visible_character(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if character < " ":
        return chr(0x2400 + ord(character))  # Unicode has a picture for each: ␀ ␛ ␍ ...
    if unicodedata.category(character) in _HIDDEN and character not in _JOINERS:
        return f"\\u{ord(character):04x}"
    return character
