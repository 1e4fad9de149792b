"""From the spaced-out tokens of old corpora back to running text.

Language models of today read ordinary text, so perplexity on these corpora is measured after undoing their
tokenisation. The rules are those of the published evaluations (SEDD, MDLM and what follows them), as
substitutions in order; they are not perfect inverses, and their quirks are part of the measure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

Detokenizer = Callable[[str], str]
#: A substitution: a plain string or a compiled pattern, and what to put in its place.
Rule = tuple["str | re.Pattern[str]", str]


def substitute(rules: tuple[Rule, ...], text: str) -> str:
    for old, new in rules:
        text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
    return text


def _within(opening: str, closing: str, inside: str) -> re.Pattern[str]:
    """Text between two marks with blanks next to them."""
    return re.compile(rf"{opening}\s*({inside}*?)\s*{closing}")


_PUNCTUATION: tuple[Rule, ...] = tuple((f" {mark} ", f"{mark} ") for mark in ":;.!?,")

WIKITEXT: tuple[Rule, ...] = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *_PUNCTUATION,
    (_within(r"\(", r"\)", r"[^)]"), r"(\1)"),
    (_within(r"\[", r"\]", r"[^\]]"), r"[\1]"),
    (_within("{", "}", "[^}]"), r"{\1}"),
    (_within('"', '"', '[^"]'), r'"\1"'),
    (_within("'", "'", "[^']"), r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)

#: Numbers are "N" in this corpus; of several in a row, each pass sees every other one.
PTB: tuple[Rule, ...] = (
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    ("\\/", "/"),
    *((" N ", " 1 "),) * 2,
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
)

LM1B: tuple[Rule, ...] = (
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "),
    (re.compile(r" (\w+) \.$"), r" \1."),
    (" ? ", "? "),
    (re.compile(r" \?$"), "?"),
    (" ! ", "! "),
    (re.compile(r" !$"), "!"),
    (" , ", ", "),
    (" : ", ": "),
    (" ; ", "; "),
    (" / ", "/"),
    (re.compile(r'" ([^"]+) "'), r'"\1"'),
    (re.compile(r"' ([^']+) '"), r"'\1'"),
    (re.compile(r"\( ([^()]+) \)"), r"(\1)"),
    (re.compile(r"\[ ([^\[\]]+) \]"), r"[\1]"),
    ("$ ", "$"),
    ("\N{POUND SIGN} ", "\N{POUND SIGN}"),
)


def lambada(text: str) -> str:
    """Plain quotation marks; every passage begins on a new line."""
    quotes = str.maketrans(
        {"\N{LEFT DOUBLE QUOTATION MARK}": '"', "\N{RIGHT DOUBLE QUOTATION MARK}": '"'}
    )
    return "\n" + text.translate(quotes).strip()


#: By name, as a manifest records them. A new one is a function and a line here.
DETOKENIZERS: dict[str, Detokenizer] = {
    "none": str,
    "wikitext": partial(substitute, WIKITEXT),
    "ptb": partial(substitute, PTB),
    "lm1b": partial(substitute, LM1B),
    "lambada": lambada,
    "papers": partial(substitute, (*WIKITEXT, *LM1B)),
}
