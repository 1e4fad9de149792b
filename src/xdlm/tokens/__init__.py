"""From media to token ids and back."""

from xdlm.tokens.codes import Codes
from xdlm.tokens.known import known_tokenizer
from xdlm.tokens.pixels import Pixels
from xdlm.tokens.stored import ImageTokenizer, Tokenizer, read_tokenizer
from xdlm.tokens.text import TextTokenizer

__all__ = [
    "Codes",
    "ImageTokenizer",
    "Pixels",
    "TextTokenizer",
    "Tokenizer",
    "known_tokenizer",
    "read_tokenizer",
]
