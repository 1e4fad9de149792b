"""Documents from wherever they are.

A source is the embedded corpus (`corpus:train`), a corpus of the table in `specs` (`ptb:test`), a file, or
a folder of files in the order of their paths. Of files that nothing is known about, a `.txt` is one
document, and `.jsonl`, `.json`, `.csv` and `.parquet` hold one per record, in the field `text`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from xdlm.data.detokenizers import DETOKENIZERS
from xdlm.data.readers import FORMATS, Reader, split_name, text_of
from xdlm.data.specs import SPECS, DatasetSpec, Split
from xdlm.errors import UserError, did_you_mean

#: Names of the form `corpus:part` stand for the text that ships with the package.
EMBEDDED = ("corpus:train", "corpus:heldout")
#: Where local data lies, unless this variable names another folder.
ROOT_VARIABLE, DEFAULT_ROOT = "XDLM_DATA", "data"


@dataclass(frozen=True)
class Source:
    """Text that has been found: in `files`, or on the hub if there are none."""

    name: str
    files: tuple[Path, ...]
    reader: Reader = field(default_factory=Reader)
    detokenizer: str = "none"
    split: Split = field(default_factory=lambda: Split(()))
    spec: DatasetSpec | None = None

    def documents(self) -> Iterator[str]:
        """The documents in a fixed order. Empty ones are skipped."""
        detokenize, found = DETOKENIZERS[self.detokenizer], False
        for text in _part(self._all(), self.split):
            if text.strip():
                found = True
                yield detokenize(text)
        if not found:
            raise UserError(f"{self.name} holds no text")

    def _all(self) -> Iterator[str]:
        if not self.files:
            assert self.spec is not None
            yield from _hub_documents(self.name, self.spec, self.split)
        for file in self.files:
            yield from self.reader.documents(file)


def read_documents(source: str) -> Iterator[str]:
    return open_source(source).documents()


def open_source(source: str, root: str | Path | None = None) -> Source:
    """Find a source; `root` is the folder of local data."""
    if source in EMBEDDED:
        part = source.removeprefix("corpus:")
        file = Path(str(resources.files("xdlm") / "data" / "corpus" / f"{part}.jsonl.xz"))
        return Source(source, (file,))
    name, colon, part = source.partition(":")
    if colon and not Path(source).exists():
        return _open_known(source, name, part, Path(root or _default_root()))
    path = Path(source)
    if path.is_file():
        if split_name(path)[0] not in FORMATS:
            raise UserError(
                f"{path}: unknown format; expected one of {', '.join(FORMATS)} (plain, .gz or .xz)"
            )
        return Source(source, (path,))
    if not path.is_dir():
        raise UserError(f"no such file or folder: {source}")
    files = sorted(p for p in path.rglob("*") if p.is_file() and split_name(p)[0] in FORMATS)
    if not files:
        raise UserError(f"no {', '.join(FORMATS)} files (plain, .gz or .xz) under {source}")
    return Source(source, tuple(files))


def _open_known(source: str, name: str, part: str, root: Path) -> Source:
    known = [*EMBEDDED, *(f"{n}:{p}" for n, spec in SPECS.items() for p in spec.splits)]
    if name not in SPECS or part not in SPECS[name].splits:
        raise UserError(f"no corpus '{source}'{did_you_mean(source, known)}")
    spec = SPECS[name]
    split = spec.splits[part]
    reader = Reader(spec.unit, spec.fields, spec.columns)
    for pattern in split.files:
        files = sorted(p for p in root.glob(pattern) if p.is_file())
        if len(files) > 1 and split.single:
            raise UserError(
                f"{source}: both {files[0].name} and {files[1].name} under {files[0].parent} match; "
                "keep one of them"
            )
        if files:
            return Source(source, tuple(files), reader, spec.detokenizer, split, spec)
    if spec.hub is None or split.hub is None:
        raise UserError(_not_there(source, split, root))
    return Source(source, (), reader, spec.detokenizer, split, spec)


def _default_root() -> str:
    return os.environ.get(ROOT_VARIABLE, DEFAULT_ROOT)


def _not_there(source: str, split: Split, root: Path | str) -> str:
    return (
        f"{source} is not there: no file {' or '.join(split.files)} under {root} "
        f"(set {ROOT_VARIABLE} to the folder that holds it)"
    )


def _part(documents: Iterable[str], split: Split) -> Iterator[str]:
    """All but the last documents, or only those, or some of the characters."""
    if split.characters is not None:
        start, stop = split.characters
        yield "".join(documents)[start:stop]
    elif split.last:
        yield from deque(documents, maxlen=split.last)
    elif split.but_last:
        held: deque[str] = deque()
        for document in documents:
            held.append(document)
            if len(held) > split.but_last:
                yield held.popleft()
    else:
        yield from documents


def _hub_documents(source: str, spec: DatasetSpec, split: Split) -> Iterator[str]:
    absent = _not_there(source, split, _default_root())
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{absent}; to fetch it from the hub install xdlm[text]") from error
    try:
        records = datasets.load_dataset(spec.hub, spec.hub_config, split=split.hub, streaming=True)
        for record in records:
            text = text_of(record, spec.fields)
            if text is None:
                raise UserError(f"{spec.hub}: no text under {' or '.join(spec.fields)}")
            yield text
    except UserError:
        raise
    except Exception as error:  # the library raises whatever its network layers do
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{absent}, and {spec.hub} cannot be fetched: {reason}") from error
