"""Documents to rows of equal length.

The rule, in full: every document becomes `[bos?] tokens [eos?]` (by default only the end token); all
documents are laid end to end in their order; row i is tokens i*length .. (i+1)*length of that stream.
Nothing else is inserted, nothing is shuffled, and nothing depends on how many cores did the work.
What is left over at the end, less than a row, is the `tail`: evaluation counts it, training does not
see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xdlm.errors import UserError
from xdlm.tokens import TextTokenizer

#: Documents handed to the tokenizer at a time.
_GROUP = 64


@dataclass(frozen=True)
class Rows:
    """Packed text: `rows` [n, length] and the shorter `tail`, with the characters they came from."""

    rows: NDArray[np.unsignedinteger]
    tail: NDArray[np.unsignedinteger]
    n_characters: int
    n_documents: int

    @property
    def length(self) -> int:
        return self.rows.shape[1]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def n_tokens(self) -> int:
        return self.rows.size + self.tail.size


def pack(
    documents: Iterable[str],
    tokenizer: TextTokenizer,
    length: int,
    *,
    bos: bool = False,
    eos: bool = True,
    on_document: Callable[[int], None] | None = None,
) -> Rows:
    """Tokenise and pack. The begin token is the end-of-text token, as in GPT-2's vocabulary."""
    if length < 1:
        raise UserError(f"a row needs at least one token, got length={length}")
    dtype: type[np.unsignedinteger] = np.uint16 if tokenizer.size < 2**16 else np.uint32
    stream: list[NDArray[np.unsignedinteger]] = []
    n_characters = n_documents = 0
    group: list[str] = []
    before, after = [tokenizer.eos_id] * bos, [tokenizer.eos_id] * eos

    def flush() -> None:
        nonlocal n_characters, n_documents
        for text, ids in zip(group, tokenizer.encode_many(group), strict=True):
            stream.append(np.asarray(before + ids + after, dtype=dtype))
            n_characters += len(text)
            n_documents += 1
            if on_document is not None:
                on_document(n_documents)
        group.clear()

    for document in documents:
        group.append(document)
        if len(group) == _GROUP:
            flush()
    flush()
    tokens: NDArray[np.unsignedinteger]
    tokens = np.concatenate(stream) if stream else np.empty(0, dtype=dtype)
    whole = len(tokens) // length * length
    return Rows(tokens[:whole].reshape(-1, length), tokens[whole:], n_characters, n_documents)
