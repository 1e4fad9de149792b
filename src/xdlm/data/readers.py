"""Documents out of files: plain text, .jsonl, .json, .csv and .parquet, also compressed (.gz, .xz)."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from xdlm.data.specs import Unit
from xdlm.errors import UserError

_OPENERS: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open, "": open}
#: Formats that say what they are; anything else is plain text where a corpus says so.
STRUCTURED = (".jsonl", ".json", ".csv", ".parquet")
FORMATS = (".txt", *STRUCTURED)
#: Records of a parquet file that are Python objects at a time.
_ROWS = 1024
_LINES: dict[Unit, Callable[[str], str]] = {
    "line": lambda line: line.rstrip("\n"),
    "stripped line": str.strip,
    "whole line": str,
}


@dataclass(frozen=True)
class Reader:
    """How to read the files of a corpus; the defaults are for files that nothing is known about."""

    unit: Unit = "file"
    fields: tuple[str, ...] = ("text",)
    columns: tuple[str, ...] = ()

    def documents(self, path: Path) -> Iterator[str]:
        """The documents of a file in order, empty ones included."""
        if split_name(path)[0] in STRUCTURED:
            for number, record in self.records(path):
                yield string_in(record, self.fields, f"{path}, record {number}")
            return
        with _opened(path) as stream:
            if self.unit == "file":
                yield stream.read()
            else:
                yield from map(_LINES[self.unit], stream)

    def records(self, path: Path) -> Iterator[tuple[int, Any]]:
        """Those of a structured file, numbered; where a format allows it, with the fields of interest
        alone."""
        kind = split_name(path)[0]
        if kind == ".parquet":
            yield from _parquet(path, self.fields)
            return
        with _opened(path) as stream:
            if kind == ".jsonl":
                yield from _json_lines(path, stream)
            elif kind == ".json":
                yield from enumerate(_json(path, stream), start=1)
            else:
                csv.field_size_limit(1 << 30)
                yield from enumerate(csv.DictReader(stream, self.columns or None), start=1)


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """A file of text, with one line for whatever is wrong with it."""
    kind, packed = split_name(path)
    newline = "" if kind == ".csv" else None
    try:
        with _OPENERS[packed](path, "rt", encoding="utf-8-sig", newline=newline) as stream:
            yield stream
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it first"
        ) from error
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} is damaged or not {packed}: {error}") from error
    except csv.Error as error:
        raise UserError(f"{path} is not CSV: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def string_in(record: Any, fields: tuple[str, ...], where: str) -> str:
    """The text of a record under the first of the names that is there."""
    text = text_of(record, fields)
    if text is None:
        expected = " or ".join(f"'{name}'" for name in fields)
        raise UserError(f"{where}: expected a string field {expected}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the text holds half a character (a surrogate)") from error
    return text


def text_of(record: Any, fields: tuple[str, ...]) -> str | None:
    """The text of a record under the first of the names that is there; None if none is."""
    if not isinstance(record, Mapping):
        return None
    for name in fields:
        parts = [record.get(part) for part in name.split("+")]
        if all(isinstance(part, str) for part in parts):
            return " ".join(str(part) for part in parts)
    return None


def split_name(path: Path) -> tuple[str, str]:
    """(format, compression) by suffix."""
    packed = path.suffix if path.suffix in _OPENERS else ""
    return Path(path.name.removesuffix(packed)).suffix, packed


def _json_lines(path: Path, stream: IO[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:  # a number too long, a nesting too deep
            raise UserError(f"{path}, line {number}: cannot be read ({error})") from error


def _json(path: Path, stream: IO[str]) -> list[Any]:
    try:
        records = json.load(stream)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(records, list):
        raise UserError(f"{path}: expected a list of records")
    return records


def _parquet(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
    """Records with the columns that may hold the text, one group of rows at a time: memory holds one
    group's text, however large the file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{path}: parquet files need pyarrow; install xdlm[hub]") from error
    wanted = {part for name in fields for part in name.split("+")}
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in wanted]
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns):
                    for record in batch.to_pylist():
                        number += 1
                        yield number, record
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is damaged or not parquet: {reason}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
