"""`xdlm prepare`: tokenise text once, into shards that training and evaluation read from disk."""

from __future__ import annotations

import time
from dataclasses import dataclass

from xdlm.api import load_tokenizer
from xdlm.cli.options import parse
from xdlm.cli.prepare_imagenet import run as encode_images
from xdlm.cli.progress import telling
from xdlm.data import Rules, open_source, prepare

_DESCRIPTION = """Tokenise text into a folder of memory-mapped shards with a manifest. The same text,
tokenizer and rules give the same bytes, whatever the number of workers; an interrupted run goes on where
it stopped when it is started again.

A source is corpus:train, a corpus of the papers (ptb:test, wikitext2:test, lm1b:test, lambada:test,
ag_news:test, arxiv:test, pubmed:test, openwebtext:train, ...), a file, or a folder of files (.txt,
.jsonl, .json, .csv, .parquet; plain, .gz or .xz). The papers' corpora are looked for under --root, and
fetched into it from the hub, as files of one commit, where they are not there and there is network.

examples:
  xdlm prepare --data my-texts/ --tokenizer pocket --out prepared/mine
  xdlm prepare --data openwebtext:train --root /data --tokenizer gpt2 --out prepared/owt --workers 4
  xdlm prepare --data fineweb-edu:train --root /data --tokenizer gpt2 --out prepared/fineweb-edu
  xdlm train recipes/cpu-tiny.yaml --data.train prepared/mine

Images: `xdlm prepare imagenet --help`.
"""


@dataclass(frozen=True)
class Options:
    data: str
    """Text to tokenise."""
    out: str
    """Folder to write to."""
    tokenizer: str = "pocket"
    """A tokenizer.json, a folder that holds one, the name of a bundled model, gpt2 or bert-base-uncased
    (from --root, or the hub)."""
    root: str | None = None
    """Folder of the papers' corpora; by default that of the variable XDLM_DATA, or data."""
    workers: int = 1
    """Processes that tokenise. One uses all cores already; more help where reading is slower."""
    bos: bool = False
    """Put the begin token before every document."""
    eos: bool = True
    """Put the end token after every document."""
    limit: int | None = None
    """Use at most this many documents, the first ones."""


def run(arguments: list[str]) -> None:
    if arguments[:1] == ["imagenet"]:
        encode_images(arguments[1:])
        return
    options = parse(Options, arguments, prog="xdlm prepare", description=_DESCRIPTION)
    source = open_source(options.data, options.root)
    tokenizer = load_tokenizer(options.tokenizer, options.root)
    rate = _Rate()
    with telling(f"tokenising {source.name}") as tell:

        def show(documents: int, tokens: int) -> None:
            rate.note(tokens)
            tell(f"{documents:,} documents, {tokens:,} tokens, {rate}")

        manifest = prepare(
            source, tokenizer, options.out,
            rules=Rules(options.bos, options.eos, options.limit),
            workers=options.workers, on_progress=show,
        )  # fmt: skip
    was_there = rate.tokens == 0
    rate.note(manifest.tokens)  # with the time that writing the last shard took
    print(
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, "
        f"{manifest.characters:,} characters in {len(manifest.shards)} shards -> {options.out}"
        f" ({'already there' if was_there else rate})"
    )


class _Rate:
    """Tokens per second since the first count, which may hold those of an earlier run."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self.tokens, self._seconds = 0, 0.0

    def note(self, tokens: int) -> None:
        if self._first is None:
            self._first = tokens, time.perf_counter()
        self.tokens = tokens - self._first[0]
        self._seconds = time.perf_counter() - self._first[1]

    def __str__(self) -> str:
        return f"{self.tokens / max(self._seconds, 1e-9):,.0f} tokens/s"
