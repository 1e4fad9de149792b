"""What an interrupted preparation has finished: a journal beside the shards until all are there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from xdlm.data.shards import JOURNAL, Shard, check_shard
from xdlm.errors import UserError
from xdlm.files import sha256_of, write_atomic


class Finished(Protocol):
    """A manifest: its inputs by name, and the shards that were made of them."""

    @property
    def shards(self) -> Sequence[Shard]: ...


def compare(found: dict[str, Any], wanted: dict[str, Any], out: Path) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise UserError(
                f"{out} was made from other inputs ({name} differs); choose another folder or "
                "delete this one"
            )


def holds_anything(out: Path) -> bool:
    """More than what a kill in the middle of writing a first file would leave."""
    if not out.is_dir():
        return out.exists()
    return any(not file.name.endswith(".partial") for file in out.iterdir())


def write_journal(out: Path, inputs: dict[str, Any], shards: list[Shard]) -> None:
    journal = {"inputs": inputs, "shards": [asdict(shard) for shard in shards]}
    write_atomic(out / JOURNAL, json.dumps(journal))


@contextmanager
def nothing_for_nothing(out: Path, shards: Sequence[Shard]) -> Iterator[None]:
    """Bad input that is found before the first shard is done leaves no journal behind, which would bind the
    folder to that input."""
    try:
        yield
    except UserError:
        if not shards:
            (out / JOURNAL).unlink(missing_ok=True)
            if not any(out.iterdir()):
                out.rmdir()
        raise


def check_finished(done: Finished, inputs: dict[str, Any], out: Path) -> None:
    """That what a folder holds was made of the same inputs, and is whole."""
    compare({name: getattr(done, name) for name in inputs}, inputs, out)
    for shard in done.shards:
        check_shard(out / shard.name, shard)


def journal_of(out: Path, inputs: dict[str, Any]) -> list[Shard]:
    """Shards that an interrupted run has finished; a folder that holds anything else is an error."""
    file = out / JOURNAL
    if not file.is_file():
        if holds_anything(out):
            raise UserError(f"{out} holds something else; choose another folder")
        return []
    try:
        journal = json.loads(file.read_text(encoding="utf-8"))
        shards = [Shard(**shard) for shard in journal["shards"]]
        found = journal["inputs"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} is damaged: {error}; delete {out} and start again") from error
    compare(found, inputs, out)
    whole = []
    for shard in shards:
        file = out / shard.name
        if not file.is_file() or sha256_of(file) != shard.sha256:
            break  # from here on make them again
        whole.append(shard)
    return whole
