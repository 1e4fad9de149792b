"""Data that is broken, missing or not what it should be: one line, exit code 2, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from xdlm.api import load_tokenizer
from xdlm.cli.main import main
from xdlm.data import open_source, prepare
from xdlm.tokens import TextTokenizer

RECIPE = Path(__file__).parents[2] / "recipes" / "cpu-tiny.yaml"


def refusal(capsys, *arguments: object) -> str:
    """The line that a command is refused with."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night. " * 200)
    prepare(open_source(str(text)), load_tokenizer("pocket"), tmp_path / "shards")
    return tmp_path / "shards"


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def edit_manifest(folder: Path, **changes: object) -> None:
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


BREAKAGES = {
    "a flipped bit": (lambda f: flip(f / "tokens-00000.bin", 100), "tokens-00000.bin is damaged"),
    "a cut shard": (
        lambda f: (f / "tokens-00000.bin").write_bytes(b"1234"), "is truncated or altered"
    ),
    "a lost shard": (lambda f: (f / "tokens-00000.bin").unlink(), "tokens-00000.bin is missing"),
    "a cut manifest": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is damaged"),
    "an odd dtype": (lambda f: edit_manifest(f, dtype="float9"), "its counts do not agree"),
    "a wrong count": (lambda f: edit_manifest(f, tokens=9), "its counts do not agree"),
    "a later format": (lambda f: edit_manifest(f, format=99), "has format 99"),
}  # fmt: skip


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_shards(tmp_path: Path, capsys, shards: Path, breakage: str) -> None:
    break_it, says = BREAKAGES[breakage]
    break_it(shards)
    run = tmp_path / "run"
    assert says in refusal(
        capsys, "train", RECIPE, "--data.train", shards, "--train.out", run, "--train.steps", 1
    )
    assert not run.exists()
    assert says in refusal(capsys, "eval", "ppl", "--data", shards)


def test_shards_of_another_tokenizer(tmp_path: Path, capsys, shards: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text(TextTokenizer.train(["some other text"], 300).to_json())
    line = refusal(
        capsys, "train", RECIPE, "--data.train", shards, "--data.tokenizer", other,
        "--train.out", tmp_path / "run",
    )  # fmt: skip
    assert f"{shards} was prepared with another tokenizer" in line
    assert not (tmp_path / "run").exists()


TEXTS: dict[str, tuple[bytes, str]] = {
    "no.parquet": (b"this is no parquet file at all", "is damaged or not parquet"),
    "short.parquet": (b"PAR1", "is damaged or not parquet"),
    "empty.parquet": (b"", "is damaged or not parquet"),
    "bad.jsonl": (b'{"text": "a"}\n{"text"\n', "bad.jsonl, line 2: not JSON"),
    "none.jsonl": (b'{"text": "a"}\n{"txt": "b"}\n', "record 2: expected a string field 'text'"),
    "null.jsonl": (b'{"text": null}\n', "record 1: expected a string field 'text'"),
    "list.jsonl": (b'["a"]\n', "record 1: expected a string field 'text'"),
    "latin.txt": ("café".encode("latin-1"), "is not UTF-8"),
    "blank.txt": (b" \n", "holds no text"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_broken_texts(tmp_path: Path, capsys, name: str) -> None:
    content, says = TEXTS[name]
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    line = refusal(capsys, "prepare", "--data", tmp_path / name, "--out", out)
    assert says in line and name in line
    assert not out.exists()


def test_broken_parquet(tmp_path: Path, capsys) -> None:
    """Whole at its end, where its table of contents is, and damaged before; and without a text."""
    file, out = tmp_path / "some.parquet", tmp_path / "out"
    texts = [f"Document {i} says {i * 37 % 1009}." for i in range(2000)]
    for changed, says in (
        ({"text": pa.array(range(3))}, "record 1: expected a string field 'text'"),
        ({"title": ["a", "b"]}, "record 1: expected a string field 'text'"),
        ({"text": ["a", None]}, "record 2: expected a string field 'text'"),
    ):
        parquet.write_table(pa.table(changed), file)
        assert says in refusal(capsys, "prepare", "--data", file, "--out", out)
    parquet.write_table(pa.table({"text": texts}), file, compression="gzip")
    content = bytearray(file.read_bytes())
    content[1000:1100] = bytes(100)
    file.write_bytes(content)
    line = refusal(capsys, "prepare", "--data", file, "--out", out)
    assert str(file) in line
    assert not out.exists()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("openwebtext:train", "openwebtext:train is not there: no file openwebtext/*"),
        ("text8:test", "text8:test is not there: no file text8/text8*"),
        ("openwebtxt:train", "did you mean 'openwebtext:train'"),
        ("nowhere/at/all", "no such file or folder: nowhere/at/all"),
    ],
)
def test_data_that_is_not_there(tmp_path: Path, capsys, monkeypatch, data: str, says: str) -> None:
    monkeypatch.setenv("XDLM_DATA", str(tmp_path / "root"))
    out = tmp_path / "out"
    assert says in refusal(capsys, "prepare", "--data", data, "--out", out)
    assert says in refusal(capsys, "train", RECIPE, "--data.train", data, "--train.out", out)
    assert says in refusal(capsys, "eval", "ppl", "--data", data)
    assert not list(tmp_path.iterdir())
