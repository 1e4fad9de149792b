"""Text to shards of tokens, on several cores, the same bytes whatever their number.

Documents are taken in order into groups of some million characters; groups are tokenised anywhere and
written in order, and a shard is a fixed number of groups. So neither the number of workers nor an
interruption changes a byte: finished shards are kept in a journal, and a run that goes on skips them.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from xdlm.data.documents import Source
from xdlm.data.journal import check_finished, journal_of, write_journal
from xdlm.data.packing import encode_documents, token_dtype
from xdlm.data.shards import (
    FORMAT,
    JOURNAL,
    MANIFEST,
    TOKENIZER,
    Manifest,
    Shard,
    is_prepared,
    read_manifest,
)
from xdlm.errors import UserError
from xdlm.files import sha256_of, write_atomic
from xdlm.tokens import TextTokenizer

#: Characters in a group, at least; and groups in a shard.
GROUP_CHARACTERS, SHARD_GROUPS = 1 << 21, 32


@dataclass(frozen=True)
class Rules:
    """How documents become a stream."""

    bos: bool = False
    eos: bool = True
    limit: int | None = None


@dataclass(frozen=True)
class _Group:
    """Documents that are tokenised together, then their tokens in place of the texts."""

    tokens: bytes
    n_tokens: int
    documents: int
    characters: int


def prepare(
    source: Source,
    tokenizer: TextTokenizer,
    out: str | Path,
    *,
    rules: Rules | None = None,
    workers: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Tokenise a source into a folder; `on_progress` is told documents and tokens so far, first of all
    those that an earlier run has left.

    A folder that holds the finished result of the same inputs is left as it is; one that holds part of
    it is completed; one that holds anything else is an error.
    """
    rules, out = rules if rules is not None else Rules(), Path(out)
    if workers < 1:
        raise UserError(f"at least one worker is needed, got {workers}")
    if rules.limit is not None and rules.limit < 1:
        raise UserError(f"a limit must be at least 1 document, got {rules.limit}")
    inputs = _inputs(source, tokenizer, rules)
    if is_prepared(out):
        done = read_manifest(out)
        check_finished(done, inputs, out)
        return done
    shards = journal_of(out, inputs)
    documents = islice(source.documents(), rules.limit)
    for _ in range(sum(shard.documents for shard in shards)):  # read again, not tokenised again
        next(documents)
    groups = _groups(documents)
    if on_progress is not None:
        on_progress(sum(s.documents for s in shards), sum(s.tokens for s in shards))
    with _tokenise(groups, tokenizer, rules, workers) as tokenised:
        while batch := list(_progressing(islice(tokenised, SHARD_GROUPS), shards, on_progress)):
            if not shards:  # first of all, so that a folder without one was never ours
                write_journal(out, inputs, shards)
                write_atomic(out / TOKENIZER, tokenizer.to_json())
            shards.append(_write_shard(out, len(shards), batch))
            write_journal(out, inputs, shards)
    manifest = Manifest(
        source=source.name, hub=source.hub, **inputs,
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        characters=sum(shard.characters for shard in shards),
        shards=shards,
    )  # fmt: skip
    write_atomic(out / MANIFEST, manifest.to_json())
    (out / JOURNAL).unlink(missing_ok=True)
    return manifest


def _inputs(source: Source, tokenizer: TextTokenizer, rules: Rules) -> dict[str, Any]:
    """All that decides the result, as the manifest holds it."""
    files = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file)}
        for file in source.files
    ]
    inputs = {
        "format": FORMAT, "groups": [GROUP_CHARACTERS, SHARD_GROUPS], "files": files,
        "reading": asdict(source.reader) | asdict(source.split), "detokenizer": source.detokenizer,
        **asdict(rules),
        "tokenizer_sha256": tokenizer.digest, "tokenizer_size": tokenizer.size,
        "dtype": np.dtype(token_dtype(tokenizer.size)).name,
    }  # fmt: skip
    return json.loads(json.dumps(inputs))  # as a file gives them back


def _groups(documents: Iterator[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document)
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


@contextmanager
def _tokenise(
    groups: Iterator[list[str]], tokenizer: TextTokenizer, rules: Rules, workers: int
) -> Iterator[Iterator[_Group]]:
    """Groups of tokens, in order. One worker is a thread of this process, with the tokenizer's own
    threads beneath it, so that reading goes on meanwhile."""
    begin = (tokenizer.to_json(), rules)
    executor: Executor
    if workers == 1:
        executor = ThreadPoolExecutor(1, initializer=_begin_worker, initargs=begin)
    else:
        context = multiprocessing.get_context("spawn")
        threads = max(1, (os.cpu_count() or 1) // workers)
        executor = ProcessPoolExecutor(workers, context, _begin_process, (threads, *begin))
    try:
        yield _bounded(executor, groups, 2 * workers)
    finally:
        executor.shutdown(cancel_futures=True)


def _bounded(executor: Executor, groups: Iterator[list[str]], ahead: int) -> Iterator[_Group]:
    """Like `executor.map`, but with only so many groups read ahead of the one that is asked for."""
    waiting = deque(executor.submit(_encode, group) for group in islice(groups, ahead))
    while waiting:
        done = waiting.popleft().result()
        waiting.extend(executor.submit(_encode, group) for group in islice(groups, 1))
        yield done


_WORKER: dict[str, Any] = {}


def _begin_process(threads: int, tokenizer_json: str, rules: Rules) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # of the tokenizer, before it first runs here
    _begin_worker(tokenizer_json, rules)


def _begin_worker(tokenizer_json: str, rules: Rules) -> None:
    _WORKER.update(tokenizer=TextTokenizer.from_json(tokenizer_json), rules=rules)


def _encode(texts: list[str]) -> _Group:
    tokenizer, rules = _WORKER["tokenizer"], _WORKER["rules"]
    tokens = np.concatenate(encode_documents(texts, tokenizer, bos=rules.bos, eos=rules.eos))
    little = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
    return _Group(little.tobytes(), tokens.size, len(texts), sum(map(len, texts)))


def _progressing(
    groups: Iterator[_Group], shards: list[Shard], on_progress: Callable[[int, int], None] | None
) -> Iterator[_Group]:
    documents = sum(shard.documents for shard in shards)
    tokens = sum(shard.tokens for shard in shards)
    for group in groups:
        documents, tokens = documents + group.documents, tokens + group.n_tokens
        if on_progress is not None:
            on_progress(documents, tokens)
        yield group


def _write_shard(out: Path, number: int, groups: list[_Group]) -> Shard:
    content = b"".join(group.tokens for group in groups)
    name = f"tokens-{number:05d}.bin"
    write_atomic(out / name, content)
    return Shard(
        name, len(content), hashlib.sha256(content).hexdigest(),
        sum(group.n_tokens for group in groups), sum(group.documents for group in groups),
        sum(group.characters for group in groups),
    )  # fmt: skip
