"""A measured number and all that it depends on, one line of JSON each.

Records are appended to plain files. What is kept may be packed (.jsonl.xz), to a fifteenth of its size, and
is read as it is.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from xdlm.config import ProcessConfig, from_tree
from xdlm.errors import UserError
from xdlm.files import explained


@dataclass(frozen=True)
class EvalRecord:
    """One result. What does not apply is None."""

    metric: str
    value: float | None
    """None where it is beyond all numbers."""
    stderr: float | None
    n: int
    """How many rows or texts it is a mean over."""
    seed: int
    model: str
    step: int
    weights: str
    """Averaged ("ema") or as training left them ("raw")."""
    dtype: str
    """What the model computed in."""
    config: dict[str, Any]
    tokenizer_sha256: str
    xdlm: str
    commit: str
    torch: str
    device: str
    data: str | None = None
    data_sha256: str | None = None
    length: int | None = None
    draws: int | None = None
    steps: int | None = None
    nfe: float | None = None
    sampler: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    guidance: float | None = None
    guidance_schedule: str | None = None
    judge: str | None = None
    judge_sha256: str | None = None
    details: dict[str, float] = field(default_factory=dict)
    row_nats: list[float] | None = None
    """Of each row, where they were kept; in the same order for all models that read the same text."""


#: What was found, and by which build of what on what: two records that agree in all else measured the same.
_OUTCOME = ("value", "stderr", "nfe", "details", "row_nats", "xdlm", "commit", "torch", "device")
#: How the name of a packed file ends.
_PACKED = ".xz"
#: How every line of ours begins.
_BEGIN = b'{"metric"'


def measurement(record: EvalRecord) -> str:
    """What a record measured, as text: equal for records that answer the same question."""
    about = {k: v for k, v in dataclasses.asdict(record).items() if k not in _OUTCOME}
    return json.dumps(_finite(about), sort_keys=True)


def append_records(file: Path, records: Sequence[EvalRecord]) -> None:
    """Add lines to a file of records, each in one piece: others may be writing to it too."""
    _refuse_packed(file)
    with explained(file):
        if file.is_file():
            _mend(file)
        with file.open("ab") as stream:
            for record in records:
                tree = _finite(dataclasses.asdict(record))
                if record.row_nats is None:
                    del tree["row_nats"]
                line = json.dumps(tree, allow_nan=False) + "\n"
                stream.write(line.encode())
                stream.flush()


def read_records(file: Path) -> list[EvalRecord]:
    return _parsed(file, _content(file))


def record_files(folder: Path) -> list[Path]:
    """Files of records in a folder and those in it, packed or not."""
    return sorted([*folder.rglob("*.jsonl"), *folder.rglob(f"*.jsonl{_PACKED}")])


def check_records(file: Path) -> list[EvalRecord]:
    """What a file holds that more can be appended to: records and, after a kill, part of one; or nothing.
    A file of anything else is refused, and so is a packed one."""
    _refuse_packed(file)
    return _parsed(file, _untorn(_content(file))) if file.is_file() else []


def resume_records(file: Path) -> list[EvalRecord]:
    """What a file of records holds, none if it is not there. A last line that was cut off by a kill is
    taken out, so that more can be appended."""
    records = check_records(file)
    if file.is_file():
        with explained(file):
            _mend(file)
    return records


def _refuse_packed(file: Path) -> None:
    """What is appended beside a packed file would be measured twice."""
    for packed in (file, file.with_name(file.name + _PACKED)):
        if packed.suffix == _PACKED and (packed == file or packed.exists()):
            raise UserError(
                f"{packed} is packed: unpack it to append to it, or choose another file"
            )


def _unpacked(content: bytes) -> bytes:
    """Whole, and with nothing behind it."""
    reader = lzma.LZMADecompressor()
    records = reader.decompress(content)
    if not reader.eof or reader.unused_data:
        raise lzma.LZMAError("its end is missing, or something stands behind it")
    return records


def _content(file: Path) -> bytes:
    try:
        content = file.read_bytes()
        return _unpacked(content) if file.suffix == _PACKED else content
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except lzma.LZMAError as error:
        raise UserError(f"{file} is damaged, or not packed by xz: {error}") from error


def _mend(file: Path) -> None:
    """Have a file end where a line does."""
    with file.open("r+b") as stream:
        content = stream.read()
        kept = _untorn(content)
        if kept != content:
            stream.truncate(len(kept))
        elif kept and not kept.endswith(b"\n"):
            stream.write(b"\n")


def _untorn(content: bytes) -> bytes:
    """Lines without a last one that a kill cut off. A record that lacks only its newline is whole, and
    what does not begin like a record is not ours to take out."""
    last = content[content.rfind(b"\n") + 1 :]
    if not last.startswith(_BEGIN) and not _BEGIN.startswith(last):
        return content
    try:
        json.loads(last)
    except ValueError:
        return content[: len(content) - len(last)]
    return content


def _parsed(file: Path, content: bytes) -> list[EvalRecord]:
    records = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            records.append(_record(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(f"{file}, line {number}: not a record ({error})") from error
    return records


def _record(tree: Any) -> EvalRecord:
    """A record from JSON, strictly: what is read here is compared and drawn without another look."""
    if not isinstance(tree, dict):
        raise ValueError("expected an object")
    hints = get_type_hints(EvalRecord)
    for name, value in tree.items():
        if name not in hints:
            raise ValueError(f"unknown field {name}")
        if not _fits(value, hints[name]) or _finite(value) != value:
            raise ValueError(f"{name} cannot be {json.dumps(value)}")
    record = EvalRecord(**tree)
    if "process" in record.config:
        from_tree(ProcessConfig, record.config["process"], "config.process")
    if record.metric.endswith("ppl") and record.value is not None and record.value <= 0:
        raise ValueError(f"a perplexity cannot be {record.value:g}")
    if record.stderr is not None and record.stderr < 0:
        raise ValueError(f"stderr cannot be {record.stderr:g}")
    return record


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(value, kind) for kind in get_args(hint))
    if hint is float:
        return type(value) in (int, float)
    if get_origin(hint) is list:
        return type(value) is list and all(_fits(item, get_args(hint)[0]) for item in value)
    return type(value) is (get_origin(hint) or hint)


def _finite(value: Any) -> Any:
    """JSON has no infinities: a number that is not one becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
