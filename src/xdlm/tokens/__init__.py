"""From media to token ids and back."""

from xdlm.tokens.text import TextTokenizer

__all__ = ["TextTokenizer"]
