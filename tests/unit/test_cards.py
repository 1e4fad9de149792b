"""The cards of the bundled models say what their records say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from xdlm.bundled import bundled_folder
from xdlm.evaluation.records import read_records

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "model_cards.py"))
RECORDS = read_records(ROOT / "results" / "pocket.jsonl.xz")


@pytest.mark.parametrize("kind", TOOL["KINDS"])
def test_a_card_is_what_its_records_make(kind: str) -> None:
    card = (bundled_folder(f"pocket-{kind}") / "README.md").read_text(encoding="utf-8")
    assert TOOL["card"](kind, RECORDS) == card


def test_the_readme_has_their_table() -> None:
    table = TOOL["readme_table"](RECORDS)
    assert len(table.splitlines()) == 2 + 3 * 2 + 1  # three under two judges, and the bundled judge
    assert f"\n{table}\n\n" in (ROOT / "README.md").read_text(encoding="utf-8")
