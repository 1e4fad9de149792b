"""The corpora of the papers: where their text lies, how it is cut into documents, how it reads.

`name:split` names one. Its files are looked for under a folder of local data; where they are not there and
the hub can be reached, its files are fetched into that folder first. A new corpus is one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What a plain-text file is: one document, or one on each line. Corpora differ in what their published
#: versions leave of a line: its text, that without blanks at its ends, or all of it.
Unit = Literal["file", "line", "stripped line", "whole line"]


@dataclass(frozen=True)
class Split:
    """A part of a corpus. `files` are patterns under the data folder, of which the first that matches
    anything counts, and `single` says that it must match one file; `hub` is a pattern of its files on the
    hub, where `*` also stands for folders. `but_last` and `last` count documents, `characters` cuts the
    text of a single file; `every` takes one document in so many of the files that match `sifted`, and
    `but_every` leaves those out."""

    files: tuple[str, ...]
    hub: str | None = None
    but_last: int = 0
    last: int = 0
    characters: tuple[int, int] | None = None
    every: int = 0
    but_every: int = 0
    sifted: str = "*"
    single: bool = False


@dataclass(frozen=True)
class DatasetSpec:
    """A corpus. `fields` are the names under which structured files may hold its text, the first that is
    there; `a+b` means both, with a space between them. `hub` is its repository, at `hub_revision`: a
    commit that is known to hold these files, or else a branch, by default the main one; which commit that
    was when it was fetched is kept with the files."""

    splits: dict[str, Split]
    hub: str | None = None
    hub_revision: str | None = None
    fields: tuple[str, ...] = ("text",)
    unit: Unit = "file"
    detokenizer: str = "none"
    #: Names of the columns of its .csv files, which have no header.
    columns: tuple[str, ...] = ()


#: The branch of a repository on which the hub keeps its own conversion to parquet.
_CONVERTED = "refs/convert/parquet"
_WIKITEXT = "b08601e04326c79dfdd32d625aee71d232d685c3"


def _three(folder: str, stem: str, hub: str) -> dict[str, Split]:
    """Train, validation and test files whose names say which they are; `hub` is their folder there."""
    return {
        "train": Split((f"{folder}/{stem}train*",), f"{hub}/train*.parquet", single=True),
        "validation": Split((f"{folder}/{stem}valid*",), f"{hub}/validation*.parquet", single=True),
        "test": Split((f"{folder}/{stem}test*",), f"{hub}/test*.parquet", single=True),
    }


SPECS: dict[str, DatasetSpec] = {
    "openwebtext": DatasetSpec(
        {
            "train": Split(("openwebtext/*",), "*/train-*.parquet", but_last=100_000),
            "validation": Split(("openwebtext/*",), "*/train-*.parquet", last=100_000),
        },
        hub="Skylion007/openwebtext",
    ),
    "lm1b": DatasetSpec(
        {
            "train": Split(("lm1b/training*/*", "lm1b/news.en-*"), "*train*.parquet"),
            "test": Split(("lm1b/*heldout-00000*", "lm1b/*test*"), "*test*.parquet"),
        },
        hub="dvruette/lm1b",
        hub_revision=_CONVERTED,
        unit="line",
        detokenizer="lm1b",
    ),
    "fineweb-edu": DatasetSpec(
        {
            "train": Split(
                (
                    "fineweb-edu/data/CC-MAIN-*/*.parquet",
                    "fineweb-edu/sample/*/*.parquet",
                    "fineweb-edu/*",
                ),
                "sample/10BT/*.parquet",
            )
        },
        hub="HuggingFaceFW/fineweb-edu",
        hub_revision="87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
    ),
    "enwiki2014": DatasetSpec(
        {
            "train": Split(("enwiki2014/*.jsonl*",), but_every=200, sifted="*.3.jsonl*"),
            "validation": Split(("enwiki2014/*.3.jsonl*",), every=200, single=True),
        }
    ),
    "novels100": DatasetSpec({"train": Split(("novels100/*.jsonl*",), single=True)}),
    "text8": DatasetSpec(
        {
            "train": Split(("text8/text8*", "text8"), characters=(0, 90_000_000), single=True),
            "validation": Split(
                ("text8/text8*", "text8"), characters=(90_000_000, 95_000_000), single=True
            ),
            "test": Split(
                ("text8/text8*", "text8"), characters=(95_000_000, 100_000_000), single=True
            ),
        }
    ),
    "wikitext2": DatasetSpec(
        {
            **_three("wikitext2", "wiki.", "wikitext-2-raw-v1"),
            "test": Split(
                ("wikitext2/wiki.test.raw", "wikitext2/wiki.test*"),
                "wikitext-2-raw-v1/test*.parquet",
            ),
        },
        hub="Salesforce/wikitext",
        hub_revision=_WIKITEXT,
        unit="whole line",
        detokenizer="wikitext",
    ),
    "wikitext103": DatasetSpec(
        _three("wikitext103", "wiki.", "wikitext-103-raw-v1"),
        hub="Salesforce/wikitext",
        hub_revision=_WIKITEXT,
        unit="whole line",
        detokenizer="wikitext",
    ),
    "ptb": DatasetSpec(
        _three("ptb", "ptb.", "penn_treebank"),
        hub="ptb-text-only/ptb_text_only",
        hub_revision=_CONVERTED,
        fields=("sentence",),
        unit="stripped line",
        detokenizer="ptb",
    ),
    "lambada": DatasetSpec(
        {
            "test": Split(
                ("lambada/lambada_test.jsonl*", "lambada/*test*.jsonl*"), "default/test/*.parquet"
            )
        },
        hub="EleutherAI/lambada_openai",
        hub_revision=_CONVERTED,
        detokenizer="lambada",
    ),
    "ag_news": DatasetSpec(
        {
            "train": Split(("ag_news/train.csv",), "data/train-*.parquet"),
            "test": Split(("ag_news/test.csv",), "data/test-*.parquet"),
        },
        hub="fancyzhx/ag_news",
        hub_revision="eb185aade064a813bc0b7f42de02595523103ca4",
        columns=("label", "title", "description"),
        fields=("text", "title+description"),
    ),
    "arxiv": DatasetSpec(
        {"test": Split(("arxiv/*.jsonl*", "arxiv/*"), "arxiv/test/*.parquet")},
        hub="armanc/scientific_papers",
        hub_revision=_CONVERTED,
        fields=("article", "text"),
        detokenizer="papers",
    ),
    "pubmed": DatasetSpec(
        {"test": Split(("pubmed/*.jsonl*", "pubmed/*"), "pubmed/test/*.parquet")},
        hub="armanc/scientific_papers",
        hub_revision=_CONVERTED,
        fields=("article", "abstract"),
        detokenizer="papers",
    ),
}

#: The sets on which a model trained on OpenWebText is measured without having seen them.
ZERO_SHOT = (
    "ptb:test", "wikitext2:test", "lm1b:test", "lambada:test", "ag_news:test", "pubmed:test",
    "arxiv:test",
)  # fmt: skip
