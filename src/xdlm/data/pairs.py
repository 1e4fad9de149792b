"""Prompts with responses: one pair to a row, the prompt given, the rest to be learned.

A row is `[bos?] prompt response eos eos ...`: end tokens fill it and are learned too, so that a model can
tell where to stop. Nothing is cut: a pair that has no room is an error.

A conversation (`messages`) is a pair for each answer of the assistant: the prompt is all that comes before
it, as the tokenizer's chat template has it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xdlm.data.documents import open_source
from xdlm.data.packing import Rows, TokensInMemory, token_dtype
from xdlm.data.readers import STRUCTURED, Reader, split_name, string_in
from xdlm.errors import UserError
from xdlm.tokens import TextTokenizer
from xdlm.tokens.chat import ASSISTANT, ChatTemplate, Message, find_template

_READER = Reader(fields=("prompt", "response", "messages"))


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
    """Records with a `prompt` and a `response`, or with `messages`, from a file or a folder of files."""
    files = open_source(source).files
    for file in files:
        if split_name(file)[0] not in STRUCTURED:
            raise UserError(f"{file}: pairs are records ({', '.join(STRUCTURED)}), not plain text")
    rows: list[NDArray[np.unsignedinteger]] = []
    prompts: list[int] = []
    n_characters = 0
    pairs = islice(_pairs(files, tokenizer), limit)
    for number, (prompt, response) in enumerate(pairs, start=1):
        given, learned = tokenizer.encode(prompt), tokenizer.encode(response)
        if bos and given[:1] != [tokenizer.bos_id]:  # a template may have put it there
            given = [tokenizer.bos_id, *given]
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
            on_progress(number, 0)
    if not rows:
        raise UserError(f"{source} holds no pairs")
    stream = TokensInMemory(np.concatenate(rows), n_characters, len(rows))
    return PairRows(stream, length, prompts=np.asarray(prompts, dtype=np.int64))


def _pairs(files: Sequence[Path], tokenizer: TextTokenizer) -> Iterator[tuple[str, str]]:
    template = cache(lambda: find_template(tokenizer))  # looked for where a record needs it
    for file in files:
        for number, record in _READER.records(file):
            where = f"{file}, record {number}"
            if isinstance(record, Mapping) and record.get("messages") is not None:
                yield from _turns(record["messages"], template(), where)
            else:
                yield string_in(record, ("prompt",), where), string_in(record, ("response",), where)


def _turns(messages: Any, template: ChatTemplate | None, where: str) -> Iterator[tuple[str, str]]:
    if template is None:
        raise UserError(
            f"{where}: messages need a chat template, and the tokenizer has none; give data.tokenizer a "
            "folder with chat_template.jinja, or prompt and response as text"
        )
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UserError(
            f"{where}: messages are a list of records with a role and a content, both strings"
        )
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UserError(f"{where}: there is no message of the assistant to learn from")
    try:
        yield from template.turns(messages)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _is_message(message: Message | Any) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )
