"""Documents to rows of equal length.

The rule, in full: every document becomes `[bos?] tokens [eos?]` (by default only the end token); all
documents are laid end to end in their order; row i is tokens i*length .. (i+1)*length of that stream.
Nothing else is inserted, nothing is shuffled, and nothing depends on how many cores did the work.
What is left over at the end, less than a row, is the `tail`: evaluation counts it, training does not
see it.

Framed rows, which published code uses, hold `length - 2` tokens of the stream between a begin and an end
token of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xdlm.errors import UserError
from xdlm.tokens import TextTokenizer

Tokens = NDArray[np.unsignedinteger]

#: Documents handed to the tokenizer at a time.
_GROUP = 64


class TokenStream(Protocol):
    """Documents laid end to end, in memory or on disk."""

    @property
    def n_tokens(self) -> int: ...

    @property
    def n_characters(self) -> int: ...

    @property
    def n_documents(self) -> int: ...

    @property
    def digest(self) -> str:
        """Hash of all that decides the tokens."""
        ...

    def read(self, start: int, stop: int) -> Tokens: ...


@dataclass(frozen=True)
class TokensInMemory:
    """A `TokenStream` that is an array."""

    tokens: Tokens
    n_characters: int
    n_documents: int

    @property
    def n_tokens(self) -> int:
        return self.tokens.size

    @property
    def digest(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.tokens).data).hexdigest()

    def read(self, start: int, stop: int) -> Tokens:
        return self.tokens[start:stop]


@dataclass(frozen=True)
class Rows:
    """A stream cut into rows of `length` tokens; `frame` is the pair (begin, end) around each, if any."""

    stream: TokenStream
    length: int
    frame: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.length < 1 or self._inner < 1:
            least = 1 if self.frame is None else 3
            raise UserError(f"a row needs at least {least} tokens, got length={self.length}")

    @property
    def _inner(self) -> int:
        """Tokens of the stream in a row."""
        return self.length if self.frame is None else self.length - 2

    def __len__(self) -> int:
        return self.stream.n_tokens // self._inner

    @property
    def tail(self) -> Tokens:
        """The rest of the stream, framed like a row; empty if there is none."""
        rest = self.stream.read(len(self) * self._inner, self.stream.n_tokens)
        return rest if rest.size == 0 else self._framed(rest)

    @property
    def n_tokens(self) -> int:
        return len(self) * self.length + self.tail.size

    @property
    def n_characters(self) -> int:
        return self.stream.n_characters

    @property
    def n_documents(self) -> int:
        return self.stream.n_documents

    @property
    def digest(self) -> str:
        """Of the stream and of how it is cut."""
        what = f"{self.stream.digest} {self.length} {self.frame}"
        return hashlib.sha256(what.encode()).hexdigest()

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Some rows, [n, length]."""
        inner = self._inner
        return np.stack([
            self._framed(self.stream.read(int(i) * inner, (int(i) + 1) * inner)) for i in indices
        ]).astype(np.int64)  # fmt: skip

    def given(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Where some rows hold tokens that are given, not learned, [n, length]; None where none are."""
        return None

    @property
    def n_classes(self) -> int:
        """Classes that rows are of; 0 where they have no labels."""
        return 0

    def labels(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The classes of some rows, [n]; None where they have none."""
        return None

    def check_classes(self, known: int) -> None:
        """That a model with so many classes knows those of all rows; one that has none ignores them."""
        if 0 < known < self.n_classes:
            raise UserError(
                f"labels go up to {self.n_classes - 1}, but the model knows classes 0..{known - 1} "
                "(model.n_classes in its recipe)"
            )

    def n_learned(self, indices: Sequence[int] | NDArray[np.int64]) -> int:
        """Tokens of some rows that are learned."""
        return len(indices) * self.length

    def _framed(self, tokens: Tokens) -> Tokens:
        if self.frame is None:
            return tokens
        begin, end = (np.asarray([token], dtype=tokens.dtype) for token in self.frame)
        return np.concatenate([begin, tokens, end])


def token_dtype(tokenizer_size: int) -> type[np.unsignedinteger]:
    return np.uint16 if tokenizer_size < 2**16 else np.uint32


def encode_documents(
    texts: Sequence[str], tokenizer: TextTokenizer, *, bos: bool, eos: bool
) -> list[Tokens]:
    """Each document's tokens with its begin and end tokens."""
    dtype = token_dtype(tokenizer.size)
    encoded = tokenizer.encode_many(texts)
    tokens = [np.empty(len(ids) + bos + eos, dtype=dtype) for ids in encoded]
    for place, ids in zip(tokens, encoded, strict=True):
        place[bos : bos + len(ids)] = ids
        if bos:
            place[0] = tokenizer.bos_id
        if eos:
            place[-1] = tokenizer.eos_id
    return tokens


def pack(
    documents: Iterable[str],
    tokenizer: TextTokenizer,
    length: int,
    *,
    bos: bool = False,
    eos: bool = True,
    frame: bool = False,
    on_document: Callable[[int], None] | None = None,
) -> Rows:
    """Tokenise and pack, all in memory."""
    parts: list[Tokens] = []
    n_characters = n_documents = 0
    group: list[str] = []

    def flush() -> None:
        nonlocal n_characters, n_documents
        parts.extend(encode_documents(group, tokenizer, bos=bos, eos=eos))
        n_characters += sum(map(len, group))
        for _ in group:
            n_documents += 1
            if on_document is not None:
                on_document(n_documents)
        group.clear()

    for document in documents:
        group.append(document)
        if len(group) == _GROUP:
            flush()
    flush()
    dtype = token_dtype(tokenizer.size)
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
    stream = TokensInMemory(tokens, n_characters, n_documents)
    return Rows(stream, length, (tokenizer.bos_id, tokenizer.eos_id) if frame else None)
