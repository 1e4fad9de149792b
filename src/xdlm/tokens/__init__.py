"""From media to token ids and back."""

from xdlm.tokens.known import known_tokenizer
from xdlm.tokens.text import TextTokenizer

__all__ = ["TextTokenizer", "known_tokenizer"]
