"""Tokens on disk: a folder of shards with a manifest that says all about them.

manifest.json      format, dtype, counts; hashes of sources, tokenizer and shards; the rules that applied
tokenizer.json     the tokenizer
tokens-00000.bin   token ids, little-endian, documents laid end to end; then tokens-00001.bin, ...
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xdlm.data.packing import Tokens
from xdlm.errors import UserError
from xdlm.files import sha256_of

FORMAT = 1
MANIFEST, TOKENIZER, JOURNAL = "manifest.json", "tokenizer.json", "unfinished.json"


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    name: str
    bytes: int
    sha256: str
    tokens: int
    documents: int
    characters: int


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds and how it came to be; equal inputs give equal manifests. `source` is
    the name that the text was given by, and `hub` the repository and commit that its files were fetched
    from, if they were; neither says what the text is, `files` does."""

    format: int
    source: str
    groups: list[int]
    files: list[dict[str, Any]]
    reading: dict[str, Any]
    detokenizer: str
    bos: bool
    eos: bool
    limit: int | None
    tokenizer_sha256: str
    tokenizer_size: int
    dtype: str
    tokens: int
    documents: int
    characters: int
    shards: list[Shard]
    hub: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def is_prepared(folder: str | Path) -> bool:
    return (Path(folder) / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    if not file.is_file():
        raise UserError(f"{folder} holds no {MANIFEST}; make it with `xdlm prepare`")
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        shards = [Shard(**shard) for shard in tree.pop("shards")]
        manifest = Manifest(**tree, shards=shards)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{file} is damaged: {error}") from error
    if manifest.format != FORMAT:
        raise UserError(f"{file} has format {manifest.format}; this version reads {FORMAT}")
    if not _is_consistent(manifest):
        raise UserError(
            f"{file} is damaged: its counts do not agree; delete the folder and prepare it again"
        )
    return manifest


def _is_consistent(manifest: Manifest) -> bool:
    if manifest.dtype not in ("uint16", "uint32"):
        return False
    size = np.dtype(manifest.dtype).itemsize
    sizes_fit = all(shard.bytes == size * shard.tokens for shard in manifest.shards)
    return sizes_fit and manifest.tokens == sum(shard.tokens for shard in manifest.shards)


class MappedTokens:
    """Shards laid end to end, mapped into memory."""

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Shard],
        dtype: str,
        *,
        on_check: Callable[[int, int], None] | None = None,
    ) -> None:
        """Checks every shard against what is said of it."""
        for i, shard in enumerate(shards):
            check_shard(folder / shard.name, shard)
            if on_check is not None:
                on_check(i + 1, len(shards))
        self._shards, self._dtype = list(shards), np.dtype(dtype)
        stored = self._dtype.newbyteorder("<")
        self._maps = [np.memmap(folder / shard.name, dtype=stored, mode="r") for shard in shards]
        counts = [shard.tokens for shard in shards]
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @property
    def n_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def n_characters(self) -> int:
        return sum(shard.characters for shard in self._shards)

    @property
    def n_documents(self) -> int:
        return sum(shard.documents for shard in self._shards)

    @property
    def digest(self) -> str:
        hashes = [self._dtype.name, *(shard.sha256 for shard in self._shards)]
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()

    def read(self, start: int, stop: int) -> Tokens:
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            offset = start - int(self._starts[first])
            part = self._maps[first][offset : offset + stop - start]
            parts.append(part)
            start, first = start + len(part), first + 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=self._dtype)


class ShardedTokens(MappedTokens):
    """A `TokenStream` over the shards of text in a folder."""

    def __init__(
        self, folder: str | Path, *, on_check: Callable[[int, int], None] | None = None
    ) -> None:
        """Opens a folder and checks every shard against the manifest."""
        self.manifest = made = read_manifest(Path(folder))
        super().__init__(Path(folder), made.shards, made.dtype, on_check=on_check)


def check_shard(file: Path, shard: Shard) -> None:
    """That a file is there, whole and unchanged."""
    if not file.is_file():
        raise UserError(
            f"{file.parent} is incomplete: {file.name} is missing; delete the folder and "
            "prepare it again"
        )
    if file.stat().st_size != shard.bytes:
        raise UserError(
            f"{file} is truncated or altered: {file.stat().st_size} bytes, not {shard.bytes}; "
            "delete the folder and prepare it again"
        )
    if sha256_of(file) != shard.sha256:
        raise UserError(
            f"{file} is damaged: its content does not match {MANIFEST}; delete the folder and "
            "prepare it again"
        )
