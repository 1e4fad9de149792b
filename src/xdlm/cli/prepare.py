"""`xdlm prepare`: tokenise text once, into shards that training and evaluation read from disk."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from xdlm.api import load_tokenizer
from xdlm.cli.options import parse
from xdlm.cli.progress import console
from xdlm.data import Rules, open_source, prepare

_DESCRIPTION = """Tokenise text into a folder of memory-mapped shards with a manifest. The same text,
tokenizer and rules give the same bytes, whatever the number of workers; an interrupted run goes on where
it stopped when it is started again.

A source is corpus:train, a corpus of the papers (ptb:test, wikitext2:test, lm1b:test, lambada:test,
ag_news:test, arxiv:test, pubmed:test, openwebtext:train, ...), a file, or a folder of files (.txt,
.jsonl, .json, .csv, .parquet; plain, .gz or .xz). The papers' corpora are looked for under --root; text
from the hub must be saved there first.

examples:
  xdlm prepare --data my-texts/ --tokenizer pocket --out prepared/mine
  xdlm prepare --data openwebtext:train --root /data --tokenizer /data/gpt2 --out prepared/owt --workers 4
  xdlm train recipes/cpu-tiny.yaml --data.train prepared/mine
"""


@dataclass(frozen=True)
class Options:
    data: str
    """Text to tokenise."""
    out: str
    """Folder to write to."""
    tokenizer: str = "pocket"
    """A tokenizer.json, a folder that holds one, or the name of a bundled model."""
    root: str | None = None
    """Folder of the papers' corpora; by default that of the variable XDLM_DATA, or data."""
    workers: int = 1
    """Processes that tokenise. One uses all cores already; more help where reading is slower."""
    bos: bool = False
    """Put the begin token before every document."""
    eos: bool = True
    """Put the end token after every document."""
    limit: int | None = None
    """Use only so many documents."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm prepare", description=_DESCRIPTION)
    source = open_source(options.data, options.root)
    tokenizer = load_tokenizer(options.tokenizer)
    began, screen = time.perf_counter(), console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(f"tokenising {source.name}", total=None)

        def show(documents: int, tokens: int) -> None:
            rate = tokens / max(time.perf_counter() - began, 1e-9)
            bar.update(
                task, description=f"{documents:,} documents, {tokens:,} tokens, {rate:,.0f}/s"
            )

        manifest = prepare(
            source, tokenizer, options.out,
            rules=Rules(options.bos, options.eos, options.limit),
            workers=options.workers, on_progress=show,
        )  # fmt: skip
    print(
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, "
        f"{manifest.characters:,} characters in {len(manifest.shards)} shards -> {options.out}"
    )
