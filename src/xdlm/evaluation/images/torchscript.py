"""The tensors of a TorchScript archive, and nothing else of it.

Such a file is a zip of raw numbers, a pickle that says which of them belong where, and a program. The
program is not looked at, and in the pickle every name stands for a note of its arguments: nothing is run.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xdlm.errors import UserError


def read_torchscript(file: Path) -> dict[str, Tensor]:
    """All float32 tensors by their places in the module."""
    try:
        with zipfile.ZipFile(file) as archive:
            (listing,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            root = listing.removesuffix("data.pkl")
            module = _Notes(io.BytesIO(archive.read(listing))).load()
            notes = dict(_tensors(module, ""))
            return {
                name: _filled(note, archive.read(f"{root}data/{note.key}"))
                for name, note in notes.items()
            }
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except Exception as error:  # whatever a damaged archive or pickle makes its reader raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file} is damaged or not a TorchScript archive: {reason}") from error


class _TensorNote(NamedTuple):
    key: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _ModuleNote:
    """A module, or anything else that has attributes."""

    def __init__(self, *_: Any) -> None:
        self.attributes: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {}


class _Notes(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__"):
            return _ModuleNote
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): lambda key, offset, shape, stride, *_: (
                _TensorNote(key, offset, tuple(shape), tuple(stride))
            ),
            ("torch.jit._pickle", "build_intlist"): list,
            ("collections", "OrderedDict"): dict,
            ("torch", "FloatStorage"): "float32",
        }
        if (module, name) not in known:
            raise UserError(f"weights in float32 do not need {module}.{name}: refused")
        return known[module, name]

    def persistent_load(self, pid: Any) -> str:
        kind, dtype, key, *_ = pid
        if kind != "storage" or dtype != "float32" or not str(key).isalnum():
            raise UserError("expected float32 weights")
        return str(key)


def _tensors(node: Any, path: str) -> list[tuple[str, _TensorNote]]:
    if isinstance(node, _TensorNote):
        return [(path, node)]
    if not isinstance(node, _ModuleNote):
        return []
    prefix = f"{path}." if path else ""
    return [
        item for name, child in node.attributes.items() for item in _tensors(child, prefix + name)
    ]


def _filled(note: _TensorNote, content: bytes) -> Tensor:
    plain = tuple(math.prod(note.shape[i + 1 :]) for i in range(len(note.shape)))
    if note.stride != plain or note.offset != 0 or len(content) != 4 * math.prod(note.shape):
        raise UserError("expected each tensor in an entry of its own")
    return torch.frombuffer(bytearray(content), dtype=torch.float32).view(note.shape)
