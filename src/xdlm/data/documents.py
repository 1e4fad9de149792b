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
from fnmatch import fnmatch
from importlib import resources
from itertools import chain
from pathlib import Path

from xdlm.data.detokenizers import DETOKENIZERS
from xdlm.data.hub import fetch, fetched_folder, hub_files, hub_revision
from xdlm.data.readers import FORMATS, Reader, split_name
from xdlm.data.specs import SPECS, Split, Unit
from xdlm.errors import UserError, did_you_mean

#: Names of the form `corpus:part` stand for the text that ships with the package.
EMBEDDED = ("corpus:train", "corpus:heldout")
#: Where local data lies, unless this variable names another folder.
ROOT_VARIABLE, DEFAULT_ROOT = "XDLM_DATA", "data"


@dataclass(frozen=True)
class Source:
    """Text that has been found. `hub` says where files that were fetched came from."""

    name: str
    files: tuple[Path, ...]
    reader: Reader = field(default_factory=Reader)
    detokenizer: str = "none"
    split: Split = field(default_factory=lambda: Split(()))
    hub: str | None = None

    def documents(self) -> Iterator[str]:
        """The documents in a fixed order. Empty ones are skipped."""
        detokenize, found = DETOKENIZERS[self.detokenizer], False
        everything = chain.from_iterable(map(self._documents_of, self.files))
        for text in _part(everything, self.split, self.name):
            if text.strip():
                found = True
                yield detokenize(text)
        if not found:
            raise UserError(f"{self.name} holds no text")

    def _documents_of(self, file: Path) -> Iterator[str]:
        documents, every = self.reader.documents(file), self.split.every or self.split.but_every
        if not every or not fnmatch(file.name, self.split.sifted):
            return documents
        wanted = bool(self.split.every)
        return (text for i, text in enumerate(documents) if (i % every == 0) == wanted)

    @property
    def bytes(self) -> int:
        """Of all files, as they are stored."""
        return sum(file.stat().st_size for file in self.files)


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
        return _open_known(source, name, part, Path(root or data_root()))
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
        files = sorted(p for p in root.glob(pattern) if _may_hold_text(p, pattern, spec.unit))
        if len(files) > 1 and split.single:
            raise UserError(
                f"{source}: both {files[0].name} and {files[1].name} under {files[0].parent} match; "
                "keep one of them"
            )
        if files:
            return Source(source, tuple(files), reader, spec.detokenizer, split)
    absent = (
        f"{source} is not there: no file {' or '.join(split.files)} under {root} "
        f"(set {ROOT_VARIABLE} to the folder that holds it)"
    )
    if spec.hub is None:
        raise UserError(absent)
    folder = root / name
    fetched = fetched_folder(folder)
    if not fetched.is_dir():
        if copied := hub_files(folder, split):
            return Source(source, tuple(copied), reader, spec.detokenizer, split)
        fetch(spec, folder, absent)
    revision = hub_revision(fetched)
    found = hub_files(fetched, split)
    if not found:
        raise UserError(f"{absent}, and {revision} holds no file {split.hub}")
    return Source(source, tuple(found), reader, spec.detokenizer, split, revision)


def _may_hold_text(path: Path, pattern: str, unit: Unit) -> bool:
    """Whether a file that matches a pattern is one of a corpus. Where the pattern is a whole folder and any
    plain file would be a document, its name has to say so: a README is none."""
    if not path.is_file() or path.name[0] == ".":
        return False
    anything = pattern.endswith("/*") and unit == "file"
    return not anything or split_name(path)[0] in FORMATS


def data_root() -> str:
    """The folder of local data."""
    return os.environ.get(ROOT_VARIABLE, DEFAULT_ROOT)


def _part(documents: Iterable[str], split: Split, name: str) -> Iterator[str]:
    """All but the last documents, or only those, or some of the characters."""
    if split.characters is not None:
        start, stop = split.characters
        yield "".join(documents)[start:stop]
    elif split.last:
        last = deque(documents, maxlen=split.last)
        if len(last) < split.last:
            raise _too_few(name, len(last), split.last)
        yield from last
    elif split.but_last:
        held: deque[str] = deque()
        for document in documents:
            held.append(document)
            if len(held) > split.but_last:
                yield held.popleft()
        if len(held) < split.but_last:
            raise _too_few(name, len(held), split.but_last)
    else:
        yield from documents


def _too_few(name: str, found: int, held_out: int) -> UserError:
    return UserError(
        f"{name}: its files hold {found:,} documents, fewer than {held_out:,}, and the last {held_out:,} "
        "are for validation; to use them all give their folder"
    )
