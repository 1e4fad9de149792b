"""Shared settings: no network, one thread per worker so that two workers share two cores."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent / "unit"))
pytest.register_assert_rewrite("launching")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*.json anew")
