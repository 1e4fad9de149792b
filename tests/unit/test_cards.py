"""The cards of the bundled models say what their records say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from xdlm.bundled import bundled_folder
from xdlm.evaluation.records import read_records

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "model_cards.py"))
RECORDS = read_records(ROOT / "results" / "pocket.jsonl")


@pytest.mark.parametrize("kind", TOOL["KINDS"])
def test_a_card_is_what_its_records_make(kind: str) -> None:
    card = (bundled_folder(f"pocket-{kind}") / "README.md").read_text(encoding="utf-8")
    assert TOOL["card"](kind, RECORDS) == card


@pytest.mark.parametrize("kind", ["mdlm", "xdlm", "udlm"])
def test_the_readme_has_the_same_figures(kind: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    own = [r for r in RECORDS if r.model == f"pocket-{kind}" and r.metric in ("ppl", "gen_ppl")]
    assert len(own) == 1 + 2 * 4  # its perplexity, and that of its texts under two judges
    for record in own:
        assert f"{record.value:.1f} ± {record.stderr:.1f}" in text
