"""Prompts with responses: one pair to a row, the prompt given, the rest to be learned.

A row is `[bos?] prompt response eos eos ...`: end tokens fill it and are learned too, so that a model can
tell where to stop. Nothing is cut: a pair that has no room is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xdlm.data.documents import open_source
from xdlm.data.packing import Rows, TokensInMemory, token_dtype
from xdlm.data.readers import STRUCTURED, Reader, split_name
from xdlm.errors import UserError
from xdlm.tokens import TextTokenizer

_PROMPT, _RESPONSE = Reader(fields=("prompt",)), Reader(fields=("response",))


@dataclass(frozen=True)
class PairRows(Rows):
    """Rows of which the first tokens are given; `prompts` says how many."""

    prompts: NDArray[np.int64] | None = None

    @property
    def digest(self) -> str:
        assert self.prompts is not None
        return hashlib.sha256(super().digest.encode() + self.prompts.tobytes()).hexdigest()

    def given(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_]:
        assert self.prompts is not None
        return np.arange(self.length) < self.prompts[np.asarray(indices)][:, None]

    def n_learned(self, indices: Sequence[int] | NDArray[np.int64]) -> int:
        return int((~self.given(indices)).sum())


def load_pairs(
    source: str,
    tokenizer: TextTokenizer,
    length: int,
    *,
    bos: bool = False,
    limit: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> PairRows:
    """Records with a `prompt` and a `response` each, from a file or a folder of files."""
    files = open_source(source).files
    for file in files:
        if split_name(file)[0] not in STRUCTURED:
            raise UserError(f"{file}: pairs are records ({', '.join(STRUCTURED)}), not plain text")
    rows: list[NDArray[np.unsignedinteger]] = []
    prompts: list[int] = []
    start, n_characters = [tokenizer.bos_id] if bos else [], 0
    for number, (prompt, response) in enumerate(islice(_pairs(files), limit), start=1):
        given, learned = [*start, *tokenizer.encode(prompt)], tokenizer.encode(response)
        if len(given) + len(learned) + 1 > length:
            raise UserError(
                f"{source}, pair {number}: prompt, response and end have "
                f"{len(given) + len(learned) + 1} tokens, more than data.length {length}; "
                "raise it, or leave the pair out"
            )
        row = np.full(length, tokenizer.eos_id, dtype=token_dtype(tokenizer.size))
        row[: len(given) + len(learned)] = given + learned
        rows.append(row)
        prompts.append(len(given))
        n_characters += len(prompt) + len(response)
        if on_progress is not None:
            on_progress(number, number + 1)
    if not rows:
        raise UserError(f"{source} holds no pairs")
    stream = TokensInMemory(np.concatenate(rows), n_characters, len(rows))
    return PairRows(stream, length, prompts=np.asarray(prompts, dtype=np.int64))


def _pairs(files: Sequence[Path]) -> chain[tuple[str, str]]:
    return chain.from_iterable(
        zip(_PROMPT.documents(file), _RESPONSE.documents(file), strict=True) for file in files
    )
