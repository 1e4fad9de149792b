"""Scripts that Triton's interpreter runs on the CPU, for kernels without a GPU.

Each is a process of its own, since the interpreter must be switched on before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def check_equal(script: str) -> None:
    """It compares kernels with their twins, and says so at its end."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
