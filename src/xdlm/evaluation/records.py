"""A measured number and all that it depends on, one line of JSON each."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    judge: str | None = None
    judge_sha256: str | None = None
    details: dict[str, float] = field(default_factory=dict)


#: What was found, and by which build of what on what: two records that agree in all else measured the same.
_OUTCOME = ("value", "stderr", "nfe", "details", "xdlm", "commit", "torch", "device")


def measurement(record: EvalRecord) -> str:
    """What a record measured, as text: equal for records that answer the same question."""
    about = {k: v for k, v in dataclasses.asdict(record).items() if k not in _OUTCOME}
    return json.dumps(_finite(about), sort_keys=True)


def append_records(file: Path, records: Sequence[EvalRecord]) -> None:
    """Add lines to a file of records, each in one piece: others may be writing to it too."""
    with explained(file), file.open("ab") as stream:
        for record in records:
            line = json.dumps(_finite(dataclasses.asdict(record)), allow_nan=False) + "\n"
            stream.write(line.encode())
            stream.flush()


def read_records(file: Path) -> list[EvalRecord]:
    known = {f.name for f in dataclasses.fields(EvalRecord)}
    records = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            tree = json.loads(line)
            if unknown := set(tree) - known:
                raise ValueError(f"unknown field {min(unknown)}")
            records.append(EvalRecord(**tree))
        except (ValueError, TypeError) as error:
            raise UserError(f"{file}, line {number}: not a record ({error})") from error
    return records


def resume_records(file: Path) -> list[EvalRecord]:
    """What a file of records holds, none if it is not there. A last line that was cut off by a kill is
    taken out, so that more can be appended."""
    if not file.exists():
        return []
    with explained(file), file.open("r+b") as stream:
        content = stream.read()
        stream.truncate(content.rfind(b"\n") + 1)
    return read_records(file)


def _finite(value: Any) -> Any:
    """JSON has no infinities: a number that is not one becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
