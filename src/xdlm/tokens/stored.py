"""A tokenizer of any kind, as it lies beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path

from xdlm.errors import UserError
from xdlm.tokens.codes import Codes, is_codes
from xdlm.tokens.pixels import Pixels, is_pixels
from xdlm.tokens.text import TextTokenizer

ImageTokenizer = Pixels | Codes
Tokenizer = TextTokenizer | ImageTokenizer


def read_tokenizer(file: Path) -> Tokenizer:
    """Of text or of images: the file says which."""
    if not file.is_file():
        return TextTokenizer.load(file)  # which says what is missing
    text = file.read_text(encoding="utf-8", errors="replace")
    # A text tokenizer is megabytes of JSON, and its own library reads it.
    if len(text) > 1000:
        return TextTokenizer.load(file)
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not a tokenizer file: {error}") from error
    if is_pixels(tree):
        return Pixels.from_json(text)
    return Codes.from_json(text, file) if is_codes(tree) else TextTokenizer.load(file)
