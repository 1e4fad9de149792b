"""Documents, tokenizer, packing, order."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xdlm import UserError
from xdlm.api import load_tokenizer
from xdlm.bundled import NAMES
from xdlm.data import EMBEDDED, ShuffledOrder, open_source, pack, read_documents
from xdlm.tokens import TextTokenizer

HELDOUT = "corpus:heldout"


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer("pocket")


def test_embedded_corpus_is_there_and_split() -> None:
    train, heldout = (set(read_documents(part)) for part in EMBEDDED)
    assert sum(map(len, train)) > 10_000_000 and sum(map(len, heldout)) > 500_000
    paragraphs = {p for text in train for p in text.split("\n") if len(p) >= 60}
    assert not any(p in paragraphs for text in heldout for p in text.split("\n") if len(p) >= 60)


def test_tokenizer_round_trips(tokenizer: TextTokenizer) -> None:
    for text in ("It was late.", "  two  spaces\n\nand lines\t", "naïve café – 東京 🙂", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.size]) == ""  # the mask has no text


def test_tokenizer_is_reproducible() -> None:
    documents = list(read_documents(HELDOUT))[:3]
    first, second = (TextTokenizer.train(documents, 400).to_json() for _ in range(2))
    assert first == second


def test_bundled_models_share_a_tokenizer(tokenizer: TextTokenizer) -> None:
    assert tokenizer.size == 2048
    assert {load_tokenizer(name).digest for name in NAMES} == {tokenizer.digest}


def test_packing_rule(tokenizer: TextTokenizer) -> None:
    documents = ["One two three.", "Four.", "Five six seven eight nine ten."]
    stream = [i for text in documents for i in [*tokenizer.encode(text), tokenizer.eos_id]]
    packed = pack(documents, tokenizer, 5)
    every = packed.take(range(len(packed)))
    assert every.flatten().tolist() + packed.tail.tolist() == stream
    assert packed.length == 5 and len(packed.tail) < 5
    assert packed.n_characters == sum(map(len, documents)) and packed.n_documents == 3
    both = pack(documents, tokenizer, 5, bos=True)
    assert both.n_tokens == len(stream) + 3 and both.take([0])[0, 0] == tokenizer.eos_id
    assert pack(documents, tokenizer, 5, eos=False).n_tokens == len(stream) - 3


def test_framed_rows(tokenizer: TextTokenizer) -> None:
    """`[begin] length - 2 tokens [end]`; the rest is framed too."""
    documents = ["One two three.", "Four.", "Five six seven eight nine ten."]
    stream = [i for text in documents for i in [*tokenizer.encode(text), tokenizer.eos_id]]
    framed = pack(documents, tokenizer, 6, frame=True)
    rows = framed.take(range(len(framed)))
    assert rows[:, 1:-1].flatten().tolist() + framed.tail[1:-1].tolist() == stream
    assert (rows[:, 0] == tokenizer.bos_id).all() and (rows[:, -1] == tokenizer.eos_id).all()
    assert framed.n_tokens == rows.size + framed.tail.size
    assert framed.digest != pack(documents, tokenizer, 6).digest


def test_packing_does_not_depend_on_cores() -> None:
    script = (
        "from xdlm.api import load_tokenizer; from xdlm.data import *;"
        f"rows = pack(read_documents('{HELDOUT}'), load_tokenizer('pocket'), 128);"
        "print(rows.digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True,
            env={**os.environ, "RAYON_NUM_THREADS": threads},
        ).stdout
        for threads in ("1", "7")
    }  # fmt: skip
    assert len(digests) == 1


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("plain", encoding="utf-8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    with gzip.open(tmp_path / "d.txt.gz", "wt") as stream:
        stream.write("zipped")
    with lzma.open(tmp_path / "e.jsonl.xz", "wt") as stream:
        stream.write('{"text": "squeezed"}\n')
    (tmp_path / "ignored.bin").write_bytes(b"\x00")
    assert list(read_documents(str(tmp_path))) == ["one", "two", "plain", "zipped", "squeezed"]
    assert list(read_documents(str(tmp_path / "b.txt"))) == ["plain"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n ", "holds no text"),
        ("latin.txt", "café".encode("latin-1"), "not UTF-8"),
        ("bad.jsonl", b"{", "line 1: not JSON"),
        ("field.jsonl", b'{"txt": "a"}', "string field 'text'"),
        ("cut.txt.xz", lzma.compress(b"a" * 1000)[:30], "damaged"),
        ("bad.txt.gz", b"nonsense", "damaged"),
        ("cut.txt.gz", gzip.compress(bytes(range(256)), mtime=0)[:-100], "damaged"),
        ("flip.txt.gz", gzip.compress(b"a" * 90, mtime=0)[:12] + b"\xff\xff\xff\xff", "damaged"),
        ("half.jsonl", b'{"text": "\\ud800"}', "half a character"),
        ("deep.jsonl", b"[" * 100_000, "line 1"),
        ("long.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "line 1"),
        ("data.doc", b"a,b", "unknown format"),
        ("data.csv", b"a,b\n1,2", "string field 'text'"),
        ("data.json", b"[1", "not JSON"),
        ("data.parquet", b"PAR1", "parquet"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        list(read_documents(str(tmp_path / name)))


def test_missing_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        list(read_documents(str(tmp_path / "nothing")))
    with pytest.raises(UserError, match="did you mean 'corpus:train'"):
        list(read_documents("corpus:trains"))
    with pytest.raises(UserError, match=r"no \.txt, \.jsonl"):
        list(read_documents(str(tmp_path)))


def test_order_visits_every_row_once_an_epoch() -> None:
    order = ShuffledOrder(10, seed=3)
    epochs = order.rows(0, 30).reshape(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs.tolist())
    assert not (epochs[0] == epochs[1]).all()
    again = ShuffledOrder(10, seed=3)
    assert np.array_equal(again.rows(17, 9), epochs.flatten()[17:26])
    assert not np.array_equal(ShuffledOrder(10, seed=4).rows(0, 10), epochs[0])


def test_every_so_many_documents_are_held_out(tmp_path: Path) -> None:
    """Of one file: what validation takes is what training leaves."""
    folder = tmp_path / "enwiki2014"
    folder.mkdir()
    for shard in range(4):
        lines = [json.dumps({"id": i, "text": f"{shard} {i}"}) for i in range(401)]
        (folder / f"wiki.{shard}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    train, held = (
        list(open_source(f"enwiki2014:{part}", tmp_path).documents())
        for part in ("train", "validation")
    )
    assert held == ["3 0", "3 200", "3 400"]
    assert len(train) == 4 * 401 - 3 and not set(held) & set(train)
