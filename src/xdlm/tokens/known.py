"""The papers' tokenizers by name: from the folder of local data, or fetched into it from the hub.

<root>/<name>/tokenizer.json
"""

from __future__ import annotations

from pathlib import Path

from xdlm.hub import hub_library
from xdlm.tokens.text import FILE_NAME

#: Repository and commit. OpenWebText is cut by the first, LM1B by the second.
KNOWN = {
    "gpt2": ("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    "bert-base-uncased": (
        "google-bert/bert-base-uncased",
        "86b5e0934494bd15c9632b12f734a8a67f723594",
    ),
}


def known_tokenizer(name: str, root: Path) -> Path | None:
    """The file of a tokenizer that is known by name, fetched if need be; None for any other name."""
    if name not in KNOWN:
        return None
    file = root / name / FILE_NAME
    if not file.is_file():
        _fetch(name, file)
    return file


def _fetch(name: str, file: Path) -> None:
    repository, commit = KNOWN[name]
    absent = f"the tokenizer {name} is not at {file}"
    with hub_library(absent, repository) as hub:
        hub.HfApi().model_info(repository, revision=commit)  # fails at once without a network
        hub.hf_hub_download(repository, FILE_NAME, revision=commit, local_dir=file.parent)
