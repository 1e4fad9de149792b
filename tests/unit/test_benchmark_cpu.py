"""The script that compares ways to do the same on a CPU, at a toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/cpu.py"


def test_figures_of_every_pair_are_kept(tmp_path) -> None:
    out = tmp_path / "cpu.jsonl"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--small", "--rows", "2", "--widths", "8", "--threads", "1",
         "--seconds", "0", "--repeats", "1", "--out", out],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["task"], row["gradients"]) for row in rows] == [
        ("statistics", False), ("statistics", True), ("loss", False), ("loss", True), ("sample", False),
    ]  # fmt: skip
    for row in rows:
        assert row["ratio"] > 0 and row["ratio"] == round(row["seconds"] / row["other"], 3)
        assert row["same"] is None and row["commit"] and row["vocab"] == 501  # one run has no other
