"""From media to token ids and back."""

from xdlm.tokens.known import known_tokenizer
from xdlm.tokens.pixels import Pixels
from xdlm.tokens.stored import Tokenizer, read_tokenizer
from xdlm.tokens.text import TextTokenizer

__all__ = ["Pixels", "TextTokenizer", "Tokenizer", "known_tokenizer", "read_tokenizer"]
