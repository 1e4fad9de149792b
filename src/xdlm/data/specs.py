"""The corpora of the papers: where their text lies, how it is cut into documents, how it reads.

`name:split` names one. Its files are looked for under a folder of local data; where they are not there and
the `datasets` package can reach its hub, the text comes from there. A new corpus is one entry here.
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
    anything counts, and `single` says that it must match one file; `hub` is the split's name there.
    `but_last` and `last` count documents, `characters` cuts the text of a single file."""

    files: tuple[str, ...]
    hub: str | None = None
    but_last: int = 0
    last: int = 0
    characters: tuple[int, int] | None = None
    single: bool = False


@dataclass(frozen=True)
class DatasetSpec:
    """A corpus. `fields` are the names under which structured files and the hub may hold its text, the
    first that is there; `a+b` means both, with a space between them."""

    splits: dict[str, Split]
    hub: str | None = None
    hub_config: str | None = None
    fields: tuple[str, ...] = ("text",)
    unit: Unit = "file"
    detokenizer: str = "none"
    #: Names of the columns of its .csv files, which have no header.
    columns: tuple[str, ...] = ()


def _three(folder: str, stem: str) -> dict[str, Split]:
    """Train, validation and test files whose names say which they are."""
    return {
        "train": Split((f"{folder}/{stem}train*",), "train", single=True),
        "validation": Split((f"{folder}/{stem}valid*",), "validation", single=True),
        "test": Split((f"{folder}/{stem}test*",), "test", single=True),
    }


SPECS: dict[str, DatasetSpec] = {
    "openwebtext": DatasetSpec(
        {
            "train": Split(("openwebtext/*",), "train", but_last=100_000),
            "validation": Split(("openwebtext/*",), "train", last=100_000),
        },
        hub="Skylion007/openwebtext",
    ),
    "lm1b": DatasetSpec(
        {
            "train": Split(("lm1b/training*/*", "lm1b/news.en-*"), "train"),
            "test": Split(("lm1b/*heldout-00000*", "lm1b/*test*"), "test"),
        },
        hub="dvruette/lm1b",
        unit="line",
        detokenizer="lm1b",
    ),
    "fineweb-edu": DatasetSpec(
        {"train": Split(("fineweb-edu/*",), "train")},
        hub="HuggingFaceFW/fineweb-edu",
        hub_config="sample-10BT",
    ),
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
            **_three("wikitext2", "wiki."),
            "test": Split(("wikitext2/wiki.test.raw", "wikitext2/wiki.test*"), "test"),
        },
        hub="Salesforce/wikitext",
        hub_config="wikitext-2-raw-v1",
        unit="whole line",
        detokenizer="wikitext",
    ),
    "wikitext103": DatasetSpec(
        _three("wikitext103", "wiki."),
        hub="Salesforce/wikitext",
        hub_config="wikitext-103-raw-v1",
        unit="whole line",
        detokenizer="wikitext",
    ),
    "ptb": DatasetSpec(
        _three("ptb", "ptb."),
        hub="ptb-text-only/ptb_text_only",
        fields=("sentence",),
        unit="stripped line",
        detokenizer="ptb",
    ),
    "lambada": DatasetSpec(
        {"test": Split(("lambada/lambada_test.jsonl*", "lambada/*test*.jsonl*"), "test")},
        hub="EleutherAI/lambada_openai",
        detokenizer="lambada",
    ),
    "ag_news": DatasetSpec(
        {
            "train": Split(("ag_news/train.csv",), "train"),
            "test": Split(("ag_news/test.csv",), "test"),
        },
        hub="fancyzhx/ag_news",
        columns=("label", "title", "description"),
        fields=("text", "title+description"),
    ),
    "arxiv": DatasetSpec(
        {"test": Split(("arxiv/*.jsonl*", "arxiv/*"), "test")},
        hub="armanc/scientific_papers",
        hub_config="arxiv",
        fields=("article", "text"),
        detokenizer="papers",
    ),
    "pubmed": DatasetSpec(
        {"test": Split(("pubmed/*.jsonl*", "pubmed/*"), "test")},
        hub="armanc/scientific_papers",
        hub_config="pubmed",
        fields=("article", "abstract"),
        detokenizer="papers",
    ),
}

#: The sets on which a model trained on OpenWebText is measured without having seen them.
ZERO_SHOT = (
    "ptb:test", "wikitext2:test", "lm1b:test", "lambada:test", "ag_news:test", "pubmed:test",
    "arxiv:test",
)  # fmt: skip
