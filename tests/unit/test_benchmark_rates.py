"""The script that measures a machine's rates, at its toy size."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rates.py"


def test_rates_are_measured_and_kept(tmp_path, monkeypatch, capsys) -> None:
    """A product of m x k by k x n is 2 m k n operations, a copy reads and writes; records are appended."""
    file = tmp_path / "new" / "rates.jsonl"
    words = ["rates.py", "--small", "--device", "cpu", "--seconds", "0.01", "--out", str(file)]
    monkeypatch.setattr(sys, "argv", words)
    for _ in range(2):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    work = 2 * [2 * 64 * 32 * 500, 2 * 96**3, 2 * 2 * 2**20]
    assert [row["unit"] for row in rows] == 2 * ["TFLOP/s", "TFLOP/s", "TB/s"]
    for row, size in zip(rows, work, strict=True):
        rate = size * row["runs"] / row["seconds"] / 1e12
        assert row["rate"] == pytest.approx(rate, rel=0.02, abs=1e-4) and row["rate"] > 0
        assert row["mhz"] is row["watts"] is None and row["device"] == "cpu" and row["commit"]
    assert capsys.readouterr().out.count("product 96 x 96 x 96") == 2


def test_a_cpu_is_spared_the_full_size(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["rates.py", "--device", "cpu"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stop.value.code == 2 and "add --small" in capsys.readouterr().err
