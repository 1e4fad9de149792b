"""`xdlm tokenizer`: make a tokenizer from text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xdlm.cli.options import parse
from xdlm.cli.progress import console
from xdlm.data import read_documents
from xdlm.errors import UserError
from xdlm.files import check_file, write_atomic
from xdlm.tokens import TextTokenizer

_DESCRIPTION = """Learn a byte-level BPE tokenizer and write it as OUT/tokenizer.json.

examples:
  xdlm tokenizer --data my-texts/ --vocab-size 8192 --out tokenizers/mine
  xdlm train recipes/cpu-tiny.yaml --data.tokenizer tokenizers/mine
"""


@dataclass(frozen=True)
class Options:
    out: str
    """Folder to write to; a tokenizer that is there is never replaced."""
    data: str = "corpus:train"
    """Text to learn from: corpus:train, a .txt or .jsonl file, or a folder of them."""
    vocab_size: int = 4096
    """Number of tokens, the end-of-text token included; the mask is not counted."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm tokenizer", description=_DESCRIPTION)
    screen, target = console(), Path(options.out) / "tokenizer.json"
    check_file(target)
    if target.exists():  # what was prepared with it would no longer fit
        raise UserError(f"{target} already exists; choose another folder or remove it")
    tokenizer = TextTokenizer.train(
        read_documents(options.data), options.vocab_size, progress=screen.is_terminal
    )
    if tokenizer.size < options.vocab_size:
        screen.print(f"the text supports only {tokenizer.size} tokens, not {options.vocab_size}")
    write_atomic(target, tokenizer.to_json())
    screen.print(f"{tokenizer.size} tokens -> {target}")
