"""Corpora, detokenizers, and shards of tokens that nothing can make different."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from xdlm import UserError
from xdlm.api import load_tokenizer
from xdlm.cli.main import main
from xdlm.data import (
    SPECS,
    Rows,
    Rules,
    ShardedTokens,
    journal,
    load_rows,
    open_source,
    pack,
    prepare,
)
from xdlm.data.detokenizers import DETOKENIZERS
from xdlm.data.readers import Reader
from xdlm.tokens import TextTokenizer

#: A run in a process of its own, with groups and shards so small that the held-out novels make many.
SCRIPT = """
import sys
from importlib import import_module
from xdlm.api import load_tokenizer
from xdlm.data import open_source
module = import_module("xdlm.data.prepare")
module.GROUP_CHARACTERS, module.SHARD_GROUPS = 20_000, 2
if __name__ == "__main__":
    out, workers = sys.argv[1:]
    module.prepare(open_source("corpus:heldout"), load_tokenizer("pocket"), out, workers=int(workers))
"""


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer("pocket")


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("One two three four five.")
    (folder / "b.jsonl").write_text('{"text": "Six seven."}\n{"text": " "}\n{"text": "Eight."}\n')
    return folder


def run_script(tmp_path: Path, out: Path, workers: int) -> subprocess.Popen[bytes]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen([sys.executable, str(script), str(out), str(workers)])


def test_any_number_of_workers_and_any_interruption_give_the_same_bytes(tmp_path: Path) -> None:
    for workers in (1, 2):
        assert run_script(tmp_path, tmp_path / f"by-{workers}", workers).wait() == 0
    one, two = content(tmp_path / "by-1"), content(tmp_path / "by-2")
    assert one == two and len(one) > 10
    killed = run_script(tmp_path, tmp_path / "killed", 1)
    journal = tmp_path / "killed" / "unfinished.json"
    deadline = time.monotonic() + 60
    while not (journal.exists() and len(json.loads(journal.read_text())["shards"]) >= 3):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "manifest.json").exists()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "killed").glob("tokens-0000[0-2].bin")}
    assert run_script(tmp_path, tmp_path / "killed", 2).wait() == 0
    assert content(tmp_path / "killed") == one
    assert {p: p.stat().st_mtime_ns for p in before} == before  # finished shards were left alone


def test_shards_hold_what_packing_in_memory_gives(tmp_path: Path, texts: Path, tokenizer) -> None:
    documents = list(open_source(str(texts)).documents())
    manifest = prepare(open_source(str(texts)), tokenizer, tmp_path / "out")
    assert manifest.documents == len(documents) == 3
    assert manifest.characters == sum(map(len, documents))
    expected = pack(documents, tokenizer, 4)
    found = load_rows(str(tmp_path / "out"), tokenizer, 4)
    everything = range(len(expected))
    assert np.array_equal(found.take(everything), expected.take(everything))
    assert np.array_equal(found.tail, expected.tail)
    assert found.n_tokens == expected.n_tokens == manifest.tokens


def test_rows_run_on_from_shard_to_shard(tmp_path: Path, monkeypatch, tokenizer) -> None:
    module = sys.modules["xdlm.data.prepare"]
    monkeypatch.setattr(module, "GROUP_CHARACTERS", 10_000)
    monkeypatch.setattr(module, "SHARD_GROUPS", 1)
    source = open_source("corpus:heldout")
    rules = Rules(limit=2)
    made = prepare(source, tokenizer, tmp_path / "out", rules=rules)
    assert len(made.shards) == 2
    expected = pack(islice(source.documents(), 2), tokenizer, 700)
    found = Rows(ShardedTokens(tmp_path / "out"), 700)
    edge = made.shards[0].tokens // 700
    assert made.shards[0].tokens % 700
    for index in (0, edge - 1, edge, edge + 1, len(expected) - 1):
        assert np.array_equal(found.take([index]), expected.take([index]))
    assert np.array_equal(found.tail, expected.tail)


def test_a_finished_folder_is_left_alone_and_another_is_refused(
    tmp_path: Path, texts: Path, tokenizer
) -> None:
    source, out = open_source(str(texts)), tmp_path / "out"
    first = prepare(source, tokenizer, out)
    stamp = (out / "manifest.json").stat().st_mtime_ns
    assert prepare(source, tokenizer, out) == first
    assert (out / "manifest.json").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="other inputs \\(eos differs\\)"):
        prepare(source, tokenizer, out, rules=Rules(eos=False))
    (texts / "a.txt").write_text("Another text.")
    with pytest.raises(UserError, match="other inputs \\(files differs\\)"):
        prepare(open_source(str(texts)), tokenizer, out)


def test_a_kill_at_any_write_can_be_gone_on_from(
    tmp_path: Path, monkeypatch, texts, tokenizer
) -> None:
    """Stopped before the first, the second, ... of its writes, and started again each time."""
    module = sys.modules["xdlm.data.prepare"]
    monkeypatch.setattr(module, "GROUP_CHARACTERS", 1)
    monkeypatch.setattr(module, "SHARD_GROUPS", 1)
    source, write = open_source(str(texts)), module.write_atomic
    prepare(source, tokenizer, tmp_path / "straight")
    allowed = 0
    while True:
        left = allowed

        def stop_after_some(target: Path, text: str | bytes) -> None:
            nonlocal left
            if left == 0:
                target.parent.mkdir(exist_ok=True)
                (target.parent / f".{target.name}.partial").touch()
                raise KeyboardInterrupt
            left -= 1
            write(target, text)

        out = tmp_path / f"after-{allowed}"
        for place in (module, journal):
            monkeypatch.setattr(place, "write_atomic", stop_after_some)
        try:
            prepare(source, tokenizer, out)
            break
        except KeyboardInterrupt:
            for place in (module, journal):
                monkeypatch.setattr(place, "write_atomic", write)
            prepare(source, tokenizer, out)
        found = {k: v for k, v in content(out).items() if not k.endswith(".partial")}
        assert found == content(tmp_path / "straight")
        allowed += 1
    assert allowed > 6


def test_what_must_not_be_overwritten_or_joined(tmp_path: Path, texts: Path, tokenizer) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("mine")
    with pytest.raises(UserError, match="holds something else"):
        prepare(open_source(str(texts)), tokenizer, tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "mine"
    out = tmp_path / "out"
    made = prepare(open_source(str(texts)), tokenizer, out)
    (out / "tokens-00000.bin").unlink()
    with pytest.raises(UserError, match=r"tokens-00000\.bin is missing"):
        prepare(open_source(str(texts)), tokenizer, out)
    # Cut in other groups, an unfinished folder is another one.
    journal = json.loads(made.to_json())
    (out / "manifest.json").unlink()
    inputs = {k: v for k, v in journal.items()
              if k not in ("source", "tokens", "documents", "characters", "shards")}  # fmt: skip
    inputs["groups"] = [1, 1]
    (out / "unfinished.json").write_text(json.dumps({"inputs": inputs, "shards": []}))
    with pytest.raises(UserError, match="groups differs"):
        prepare(open_source(str(texts)), tokenizer, out)
    with pytest.raises(UserError, match="is unfinished; run `xdlm prepare` again"):
        load_rows(str(out), tokenizer, 4)
    with pytest.raises(UserError, match="limit must be at least 1"):
        prepare(open_source(str(texts)), tokenizer, tmp_path / "new", rules=Rules(limit=0))
    assert not (tmp_path / "new").exists()


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, texts: Path, tokenizer) -> None:
    out = tmp_path / "out"
    prepare(open_source(str(texts)), tokenizer, out)
    other = TextTokenizer.train(["some other text"], 300)
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        load_rows(str(out), other, 4)
    with pytest.raises(UserError, match="prepared with eos True, not False"):
        load_rows(str(out), tokenizer, 4, eos=False)
    shard = out / "tokens-00000.bin"
    whole = shard.read_bytes()
    for broken, says in (
        (whole[:-2], "truncated or altered"),
        (bytes([whole[0] ^ 1]) + whole[1:], "is damaged"),
        (None, "tokens-00000.bin is missing"),
    ):
        shard.unlink(missing_ok=True)
        if broken is not None:
            shard.write_bytes(broken)
        with pytest.raises(UserError, match=says):
            load_rows(str(out), tokenizer, 4)
    (out / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        load_rows(str(out), tokenizer, 4)


@pytest.mark.parametrize(
    ("name", "raw", "reads"),
    [
        ("ptb", "mr. <unk> has n't paid N N to N the firm 's $ N in N", "mr. ? hasn't paid 1 1 to 1 the firm's $1 in N"),  # noqa: E501
        ("wikitext", ' = = History = = \n It cost 1 @,@ 000 ( or " more " ) , he said . \n', ' == History ==\nIt cost 1,000 (or "more"), he said.\n'),  # noqa: E501
        ("lm1b", 'He said , " It \'s $ 5 . " Why ?', 'He said, "It\'s $5." Why?'),
        ("lambada", " \u201cYes,\u201d he said. ", '\n"Yes," he said.'),
        ("none", " as it is ", " as it is "),
    ],
)  # fmt: skip
def test_detokenizers(name: str, raw: str, reads: str) -> None:
    assert DETOKENIZERS[name](raw) == reads


def test_corpora_are_found_under_the_data_folder(tmp_path: Path) -> None:
    files = {
        "ptb/ptb.test.txt": " <unk> is N years old \n\n another one \n",
        "wikitext2/wiki.test.raw": " = Title = \n \n Some text . \n",
        "lm1b/news.en.heldout-00000-of-00050": "One sentence .\nAnother one .\n",
        "lambada/lambada_test.jsonl": '{"text": "a passage"}\n',
        "ag_news/test.csv": '"3","A title","What it says, at length."\n',
        "pubmed/some.jsonl": '{"pmid": "1", "abstract": "An abstract."}\n',
        "arxiv/some.jsonl": '{"id": "1", "title": "T", "text": "Another abstract."}\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = {
        "ptb:test": ["? is 1 years old", "another one"],
        "wikitext2:test": [" = Title =\n", " Some text.\n"],
        "lm1b:test": ["One sentence.", "Another one."],
        "lambada:test": ["\na passage"],
        "ag_news:test": ["A title What it says, at length."],
        "pubmed:test": ["An abstract."],
        "arxiv:test": ["Another abstract."],
    }
    for name, documents in expected.items():
        assert list(open_source(name, tmp_path).documents()) == documents


def test_one_text_in_two_files_is_not_read_twice(tmp_path: Path) -> None:
    (tmp_path / "ptb").mkdir()
    for name in ("ptb.valid.txt", "ptb.valid.txt.gz"):
        (tmp_path / "ptb" / name).write_text("a line\n")
    with pytest.raises(UserError, match=r"both ptb\.valid\.txt and ptb\.valid\.txt\.gz"):
        open_source("ptb:validation", tmp_path)


@pytest.mark.parametrize("name", ["openwebtext", "fineweb-edu", "arxiv", "pubmed"])
def test_what_lies_beside_the_texts_is_no_document(tmp_path: Path, monkeypatch, name: str) -> None:
    """Of a folder's files, those whose names say that they hold text."""
    spec = SPECS[name]
    splits = {part: replace(split, but_last=0, last=0) for part, split in spec.splits.items()}
    monkeypatch.setitem(SPECS, name, replace(spec, splits=splits))
    (tmp_path / name).mkdir()
    for file in ("README.md", "LICENSE", "SHA256SUMS", "archive.tar.xz"):
        (tmp_path / name / file).write_text("Read me.")
    (tmp_path / name / "a.txt").write_text("One.")
    (tmp_path / name / "b.csv").write_text("text,article,abstract\nTwo.,Two.,Two.\n")
    source = open_source(f"{name}:{next(iter(splits))}", tmp_path)
    assert list(source.documents()) == ["One.", "Two."]


@pytest.mark.parametrize("part", ["train", "validation"])
def test_too_few_documents_to_hold_some_out(tmp_path: Path, capsys, part: str) -> None:
    folder = tmp_path / "openwebtext"
    folder.mkdir()
    (folder / "some.jsonl").write_text('{"text": "a"}\n' * 50)
    (folder / "README.md").write_text("Read me.")
    with pytest.raises(UserError, match=r"hold 50 documents, fewer than 100,000"):
        list(open_source(f"openwebtext:{part}", tmp_path).documents())
    with pytest.raises(SystemExit):
        main(["prepare", "--data", f"openwebtext:{part}", "--root", str(tmp_path), "--out",
              str(tmp_path / "out")])  # fmt: skip
    assert "fewer than 100,000" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert len(list(open_source(str(folder)).documents())) == 50


def test_held_out_documents(tmp_path: Path, monkeypatch) -> None:
    """The last documents of a corpus are its validation set; together the two are all of it."""
    spec = SPECS["openwebtext"]
    small = {
        "train": replace(spec.splits["train"], but_last=2),
        "validation": replace(spec.splits["validation"], last=2),
    }
    monkeypatch.setitem(SPECS, "openwebtext", replace(spec, splits=small))
    (tmp_path / "openwebtext").mkdir()
    lines = "".join(json.dumps({"text": str(i)}) + "\n" for i in range(5))
    (tmp_path / "openwebtext" / "all.jsonl").write_text(lines)
    parts = [
        list(open_source(f"openwebtext:{part}", tmp_path).documents())
        for part in ("train", "validation")
    ]
    assert parts == [["0", "1", "2"], ["3", "4"]]


def test_a_corpus_that_is_not_there(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="no corpus 'ptb:tset'; did you mean 'ptb:test'"):
        open_source("ptb:tset", tmp_path)
    with pytest.raises(UserError, match="text8:test is not there: no file text8/text8"):
        open_source("text8:test", tmp_path)
    with pytest.raises(UserError, match=r"ptb:test is not there.*ptb_text_only cannot be fetched"):
        open_source("ptb:test", tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_corpus_names_a_detokenizer_that_there_is() -> None:
    for name, spec in SPECS.items():
        assert spec.detokenizer in DETOKENIZERS, name
        for split in spec.splits.values():
            assert split.files and (split.hub is None) == (spec.hub is None), name


def test_json_and_csv(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "one"}, {"text": "two"}]')
    (tmp_path / "b.csv").write_text('id,text\n1,"three, with a comma"\n')
    assert list(Reader().documents(tmp_path / "a.json")) == ["one", "two"]
    assert list(Reader().documents(tmp_path / "b.csv")) == ["three, with a comma"]


def test_command(tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "xdlm.cli.main", "prepare", "--data", str(texts)]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, check=True, env=os.environ
    )
    assert "3 documents" in done.stdout
    assert {"manifest.json", "tokenizer.json", "tokens-00000.bin"} == {
        file.name for file in out.iterdir()
    }
    bad = subprocess.run(
        [*command[:-1], str(tmp_path / "nothing"), "--out", str(tmp_path / "other")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert bad.returncode == 2 and "no such file or folder" in bad.stderr
    assert not (tmp_path / "other").exists()
