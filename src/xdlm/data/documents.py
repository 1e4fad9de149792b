"""Documents from wherever they are: the embedded corpus, a file, or a folder of files.

A `.txt` file is one document. A `.jsonl` file holds one document per line, in its field `text`.
Either may be compressed (`.gz`, `.xz`). A folder is all of its files, in the order of their paths.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import IO

from xdlm.errors import UserError, did_you_mean

#: Names of the form `corpus:part` stand for the text that ships with the package.
EMBEDDED = ("corpus:train", "corpus:heldout")

_OPENERS: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open, "": open}
_FORMATS = (".txt", ".jsonl")


def read_documents(source: str) -> Iterator[str]:
    """The documents of a source, in a fixed order. Empty ones are skipped."""
    found = False
    for file in source_files(source):
        for text in _read_file(file):
            if text.strip():
                found = True
                yield text
    if not found:
        raise UserError(f"{source} holds no text")


def source_files(source: str) -> list[Path]:
    """The files behind a source, sorted."""
    if source.startswith("corpus:"):
        if source not in EMBEDDED:
            raise UserError(f"no embedded corpus '{source}'{did_you_mean(source, EMBEDDED)}")
        part = source.removeprefix("corpus:")
        return [Path(str(resources.files("xdlm") / "data" / "corpus" / f"{part}.jsonl.xz"))]
    path = Path(source)
    if path.is_file():
        _format_of(path)
        return [path]
    if not path.is_dir():
        raise UserError(f"no such file or folder: {source}")
    files = sorted(p for p in path.rglob("*") if p.is_file() and _known(p))
    if not files:
        raise UserError(f"no .txt or .jsonl files (plain, .gz or .xz) under {source}")
    return files


def _split_name(path: Path) -> tuple[str, str]:
    """(format, compression) by suffix."""
    packed = path.suffix if path.suffix in _OPENERS else ""
    return Path(path.name.removesuffix(packed)).suffix, packed


def _known(path: Path) -> bool:
    return _split_name(path)[0] in _FORMATS


def _format_of(path: Path) -> tuple[str, str]:
    kind, packed = _split_name(path)
    if kind not in _FORMATS:
        raise UserError(f"{path}: unknown format; expected .txt or .jsonl (plain, .gz or .xz)")
    return kind, packed


def _read_file(path: Path) -> Iterator[str]:
    kind, packed = _format_of(path)
    try:
        with _OPENERS[packed](path, "rt", encoding="utf-8") as stream:
            if kind == ".txt":
                yield stream.read()
            else:
                yield from _json_lines(path, stream)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it first"
        ) from error
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} is damaged or not {packed}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _json_lines(path: Path, stream: IO[str]) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:  # a number too long, a nesting too deep
            raise UserError(f"{path}, line {number}: cannot be read ({error})") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UserError(f"{path}, line {number}: expected an object with a string field 'text'")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"{path}, line {number}: the text holds half a character (a surrogate)")
        yield text
