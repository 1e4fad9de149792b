"""Parquet files as the hub has them: read piece by piece, found in a folder, or fetched into one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from xdlm import UserError
from xdlm.api import load_tokenizer
from xdlm.cli.main import main
from xdlm.data import SPECS, load_rows, loading, open_source, pack, read_documents
from xdlm.data.readers import Reader
from xdlm.data.shards import read_manifest

COMMIT = SPECS["fineweb-edu"].hub_revision


def paragraphs(n: int) -> list[str]:
    """Real text: paragraphs of the held-out novels."""
    text = next(read_documents("corpus:heldout"))
    return [p for p in text.split("\n") if p.strip()][:n]


def write_parquet(file: Path, texts: list[str], *, rows: int = 10) -> None:
    """With columns beside the text, as on the hub."""
    file.parent.mkdir(parents=True, exist_ok=True)
    n = len(texts)
    table = pa.table(
        {"id": list(range(n)), "text": texts, "url": [f"https://x/{i}" for i in range(n)]}
    )
    parquet.write_table(table, file, row_group_size=rows)


def test_memory_holds_a_group_of_rows_and_not_the_file(tmp_path: Path) -> None:
    megabyte, groups = 1 << 20, 48
    generator = np.random.default_rng(0)
    letters = generator.integers(97, 123, groups * megabyte, dtype=np.uint8).tobytes().decode()
    quarter = megabyte // 4
    texts = [letters[i : i + quarter] for i in range(0, len(letters), quarter)]
    write_parquet(tmp_path / "large.parquet", texts, rows=4)
    assert (tmp_path / "large.parquet").stat().st_size > 20 * megabyte
    documents = Reader().documents(tmp_path / "large.parquet")
    highest, before = 0, pa.total_allocated_bytes()
    for text, expected in zip(documents, texts, strict=True):
        assert text == expected
        highest = max(highest, pa.total_allocated_bytes() - before)
    assert 0 < highest < 8 * megabyte


def test_a_folder_of_fineweb_edu_is_prepared(tmp_path: Path, capsys) -> None:
    """Laid out as the hub has it: a folder per crawl, with files in the order of their paths."""
    texts = paragraphs(90)
    places = ("CC-MAIN-2013-20/train-00000-of-00002", "CC-MAIN-2013-20/train-00001-of-00002",
              "CC-MAIN-2024-10/train-00000-of-00001")  # fmt: skip
    for i, place in enumerate(places):
        write_parquet(
            tmp_path / "fineweb-edu/data" / f"{place}.parquet", texts[30 * i : 30 * i + 30]
        )
    out = tmp_path / "out"
    command = ["prepare", "--data", "fineweb-edu:train", "--root", str(tmp_path), "--out", str(out)]
    main(command)
    assert "90 documents" in (said := capsys.readouterr().out) and said.endswith(" tokens/s)\n")
    tokenizer = load_tokenizer("pocket")
    found, expected = load_rows(str(out), tokenizer, 32), pack(texts, tokenizer, 32)
    everything = range(len(expected))
    assert np.array_equal(found.take(everything), expected.take(everything))
    manifest = read_manifest(out)
    assert len(manifest.files) == 3 and manifest.hub is None
    main(command)
    assert capsys.readouterr().out.endswith("(already there)\n")


def test_what_is_too_large_for_memory_must_be_prepared(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(loading, "IN_MEMORY", 1000)
    write_parquet(tmp_path / "a.parquet", paragraphs(90))
    tokenizer = load_tokenizer("pocket")
    with pytest.raises(
        UserError, match=r"too much to tokenise in memory.*run `xdlm prepare --data"
    ):
        load_rows(str(tmp_path), tokenizer, 32)
    assert len(load_rows(str(tmp_path), tokenizer, 4, limit=3)) > 0


class Hub:
    """Stands in for the hub: knows one repository, whose files are written where they are asked for."""

    def __init__(self, files: dict[str, list[str]]) -> None:
        self.files, self.asked = files, []
        self.fail_after: int | None = None

    def dataset_info(self, repository: str, *, revision: str | None) -> SimpleNamespace:
        self.asked.append((repository, revision))
        return SimpleNamespace(sha=revision if revision and len(revision) == 40 else "a" * 40)

    def snapshot_download(
        self,
        repository: str,
        *,
        repo_type: str,
        revision: str,
        allow_patterns: list[str],
        local_dir: Path,
    ) -> str:
        assert repo_type == "dataset" and len(revision) == 40 and allow_patterns
        (local_dir / ".cache").mkdir(parents=True, exist_ok=True)
        for i, (name, texts) in enumerate(self.files.items()):
            if i == self.fail_after:
                raise ConnectionError("the network\nis gone")
            write_parquet(local_dir / name, texts)
        return str(local_dir)


@pytest.fixture
def hub(monkeypatch) -> Callable[[dict[str, list[str]]], Hub]:
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def make(files: dict[str, list[str]]) -> Hub:
        stand_in = Hub(files)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: stand_in)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in.snapshot_download)
        return stand_in

    return make


FILES = {
    "sample/10BT/000_00000.parquet": ["one", "two"],
    "sample/10BT/001_00000.parquet": ["three"],
}


def test_a_corpus_is_fetched_once_at_its_commit(tmp_path: Path, hub) -> None:
    there = hub(FILES)
    source = open_source("fineweb-edu:train", tmp_path)
    assert list(source.documents()) == ["one", "two", "three"]
    assert there.asked == [("HuggingFaceFW/fineweb-edu", COMMIT)]
    again = open_source("fineweb-edu:train", tmp_path)
    assert again == source and len(there.asked) == 1
    out = tmp_path / "out"
    main(["prepare", "--data", "fineweb-edu:train", "--root", str(tmp_path), "--out", str(out)])
    assert (
        json.loads((out / "manifest.json").read_text())["hub"]
        == f"HuggingFaceFW/fineweb-edu@{COMMIT}"
    )
    assert read_manifest(out).files[0]["name"] == "000_00000.parquet"


def test_a_branch_is_pinned_to_the_commit_it_stood_at(tmp_path: Path, hub) -> None:
    hub({"penn_treebank/test/0000.parquet": ["no such column"]})
    source = open_source("ptb:test", tmp_path)
    assert source.hub == f"ptb-text-only/ptb_text_only@{'a' * 40}"
    with pytest.raises(UserError, match="expected a string field 'sentence'"):
        list(source.documents())
    with pytest.raises(UserError, match=r"holds no file penn_treebank/train\*"):
        open_source("ptb:train", tmp_path)


def test_a_fetch_that_breaks_off_leaves_nothing_that_looks_whole(
    tmp_path: Path, hub, capsys
) -> None:
    there = hub(FILES)
    there.fail_after = 1
    command = ["prepare", "--data", "fineweb-edu:train", "--root", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"under {tmp_path}" in line
    assert line.endswith("HuggingFaceFW/fineweb-edu cannot be fetched: the network is gone")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="the network is gone"):
        open_source("fineweb-edu:train", tmp_path)
    there.fail_after = None
    assert len(list(open_source("fineweb-edu:train", tmp_path).documents())) == 3
    assert not (tmp_path / "fineweb-edu/hub/.cache").exists()


def test_a_copy_of_the_repository_will_do(tmp_path: Path, monkeypatch) -> None:
    spec = SPECS["openwebtext"]
    last = {"validation": replace(spec.splits["validation"], last=2)}
    monkeypatch.setitem(SPECS, "openwebtext", replace(spec, splits=last))
    for i, name in enumerate(("train-00000-of-00002", "train-00001-of-00002")):
        write_parquet(tmp_path / f"openwebtext/plain_text/{name}.parquet", [f"{i}"])
    source = open_source("openwebtext:validation", tmp_path)
    assert list(source.documents()) == ["0", "1"] and source.hub is None


def test_without_the_package_the_line_names_the_extra(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"to fetch it from the hub install xdlm\[hub\]"):
        open_source("ptb:test", tmp_path)


def test_a_tokenizer_is_found_or_fetched_by_name(tmp_path: Path, monkeypatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def download(repository: str, file: str, *, revision: str, local_dir: Path) -> None:
        asked.append((repository, file, revision))
        local_dir.mkdir(parents=True)
        (local_dir / file).write_text(load_tokenizer("pocket").to_json(), encoding="utf-8")

    asking = SimpleNamespace(model_info=lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: asking)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for _ in range(2):  # the second time it is there
        assert load_tokenizer("gpt2", tmp_path).digest == load_tokenizer("pocket").digest
    assert [name for name, *_ in asked] == ["openai-community/gpt2"] and len(asked[0][2]) == 40
    monkeypatch.setenv("XDLM_DATA", str(tmp_path))
    assert load_tokenizer("gpt2").size == load_tokenizer("pocket").size
    monkeypatch.chdir(tmp_path)  # a folder of that name comes first
    (tmp_path / "gpt2" / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="is not a tokenizer file"):
        load_tokenizer("gpt2")

    def no_network(*_: object, **__: object) -> None:
        raise ConnectionError("the network\nis gone")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)
    with pytest.raises(UserError, match=r"bert-base-uncased is not at .* the network is gone"):
        load_tokenizer("bert-base-uncased")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"install xdlm\[hub\]"):
        load_tokenizer("bert-base-uncased")
