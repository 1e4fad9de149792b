"""Files of records: what a kill leaves behind, what is not ours, and what is not a record."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from results import record
from test_cli import complaint

from xdlm import UserError
from xdlm.evaluation.records import (
    append_records,
    check_records,
    read_records,
    record_files,
    resume_records,
)

FIRST, SECOND, THIRD = (record(seed=i) for i in range(3))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "records.jsonl"
    append_records(file, [FIRST, SECOND])
    return file


@pytest.mark.parametrize("left", [1, 5, 50])
def test_a_line_that_a_kill_cut_off_goes(file: Path, left: int) -> None:
    whole = file.read_bytes()
    torn = whole + whole[:left]
    file.write_bytes(torn)
    append_records(file, [THIRD])
    assert read_records(file) == [FIRST, SECOND, THIRD]
    file.write_bytes(torn)
    assert resume_records(file) == [FIRST, SECOND]
    assert file.read_bytes() == whole


def test_packed_records_are_read_and_left_alone(file: Path) -> None:
    packed = file.with_name("packed.jsonl.xz")
    packed.write_bytes(lzma.compress(file.read_bytes()))
    assert read_records(packed) == [FIRST, SECOND]
    assert record_files(file.parent) == [packed, file]
    before = packed.read_bytes()
    for change in (check_records, resume_records, lambda f: append_records(f, [THIRD])):
        with pytest.raises(UserError, match="is packed: unpack it"):
            change(packed)
    beside = packed.with_name("packed.jsonl")
    with pytest.raises(UserError, match="xz is packed: unpack it"):
        append_records(beside, [THIRD])
    assert packed.read_bytes() == before and not beside.exists()
    for damaged in (before[:-9], b"{}", before + b"more", before + file.read_bytes()):
        packed.write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged, or not packed"):
            read_records(packed)


def test_a_record_that_lacks_its_newline_stays(file: Path) -> None:
    bare = file.read_bytes().removesuffix(b"\n")
    file.write_bytes(bare)
    assert resume_records(file) == [FIRST, SECOND] and file.read_bytes() == bare + b"\n"
    file.write_bytes(bare)
    append_records(file, [THIRD])
    assert read_records(file) == [FIRST, SECOND, THIRD]


@pytest.mark.parametrize("text", [
    "What I must not forget", "one\ntwo", "one\n" + '{"metric"', '{"other": 1', "\n", "[1]\n", "\xff",
])  # fmt: skip
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, text: str) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(text, encoding="latin-1")
    before = notes.read_bytes()
    with pytest.raises(UserError, match=r"notes\.txt, line 1: not a record"):
        resume_records(notes)
    assert notes.read_bytes() == before


def test_what_is_there_already_is_never_cut_by_adding(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("What I must not forget")
    append_records(notes, [FIRST])
    assert notes.read_text().startswith('What I must not forget\n{"metric": "ppl"')


@pytest.mark.parametrize(("field", "value", "says"), [
    ("value", "abc", 'value cannot be "abc"'),
    ("value", True, "value cannot be true"),
    ("value", float("inf"), "value cannot be Infinity"),
    ("value", 0.0, "a perplexity cannot be 0"),
    ("stderr", -1.0, "stderr cannot be -1"),
    ("step", "5", 'step cannot be "5"'),
    ("step", [1], "step cannot be"),
    ("n", None, "n cannot be null"),
    ("steps", 1.5, "steps cannot be 1.5"),
    ("model", ["x"], "model cannot be"),
    ("judge", 3, "judge cannot be 3"),
    ("config", None, "config cannot be null"),
    ("config", {"process": "mixed"}, "config.process: expected a mapping"),
    ("config", {"process": {"kind": "mixd"}}, "unknown process 'mixd'"),
    ("config", {"process": {"kind": "mixed", "k": "x"}}, "config.process: k: expected a number"),
    ("config", {"process": {"kind": "mixed", "k": 2.0}}, "k must lie in"),
])  # fmt: skip
def test_what_is_not_a_record(
    file: Path, capsys, tmp_path: Path, field: str, value: object, says: str
) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps({**vars(FIRST), field: value}) + "\n")
    line = complaint(capsys, "report", "--records", str(file), "--out", str(tmp_path / "report"))
    assert f"{file}, line 3: not a record" in line and says in line
    assert not (tmp_path / "report").exists()


def test_what_applies_may_be_left_out(file: Path) -> None:
    needed = {k: v for k, v in vars(FIRST).items() if v is not None and k != "details"}
    file.write_text(json.dumps({**needed, "value": 4}) + "\n")
    assert read_records(file) == [record(value=4.0, seed=0)]
    file.write_text(json.dumps({k: v for k, v in needed.items() if k != "seed"}) + "\n")
    with pytest.raises(UserError, match=r"line 1: not a record .*'seed'"):
        read_records(file)
