"""A result of one command as a file of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xdlm.files import write_atomic


def write_json(file: Path, record: Mapping[str, Any]) -> None:
    """Strict JSON: a number that is not one becomes null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    write_atomic(file, json.dumps(clean, indent=2, allow_nan=False) + "\n")
