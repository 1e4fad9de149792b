"""Weights as others publish them: a file of `torch.save`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from xdlm.errors import UserError


def read_torch_file(file: Path) -> Any:
    """By torch's restricted reader, which runs nothing of the file."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        # What bytes that are no pickle at all make the reader raise, in words that mean nothing.
        raise UserError(f"{file} is damaged, or not a PyTorch file") from error
    except (pickle.UnpicklingError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0][:200]
        raise UserError(f"{file} is damaged or holds more than weights: {reason}") from error
