"""Named tensors in safetensors files: what a file holds, whether it fits, and reading it.

A matrix may stand there as bytes, with a number for each row that they are to be multiplied by: a quarter
of the size of float32, and read back as numbers like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from xdlm.errors import UserError
from xdlm.training.sharding import is_sharded, part_like

#: Weights come in these, by the names that safetensors has for them.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BYTES = "I8"
#: Behind the name of a matrix of bytes: the name of its rows' multipliers.
_SCALE = "#scale"


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Readable for whom a new file here is: left alone, the library hides it from everyone else."""
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(mode)
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(str(error)) from error


@torch.no_grad()
def in_bytes(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as bytes, `round(127 w / max |w|)` in each row; the rest, which is little, in bfloat16."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim != 2:
            found[name] = weight.to(torch.bfloat16)
            continue
        scale = weight.float().abs().amax(1).clamp_min(1e-30) / 127
        found[name] = (weight.float() / scale[:, None]).round().to(torch.int8)
        found[name + _SCALE] = scale
    return found


def layout_of_file(file: Path) -> dict[str, Tensor]:
    """Names, shapes and dtypes, as tensors without content."""
    layout = {}
    with safe_open(file, "pt") as source:
        held = {key: source.get_slice(key) for key in source.keys()}  # noqa: SIM118 (no dictionary)
        for key, part in held.items():
            kind, shape = part.get_dtype(), part.get_shape()
            scale = held.get(key + _SCALE)
            if kind == _BYTES and scale is not None and scale.get_shape() == shape[:1]:
                kind = scale.get_dtype()
            elif key.endswith(_SCALE) and key.removesuffix(_SCALE) in held:
                continue
            if kind not in _DTYPES:
                raise UserError(
                    f"{file}: {key} is of type {kind}; weights are of {', '.join(_DTYPES)}"
                )
            layout[key] = torch.empty(shape, dtype=_DTYPES[kind], device="meta")
    return layout


def check_fit(
    layout: Mapping[str, Tensor], targets: Mapping[str, Tensor], where: Path, whose: str
) -> None:
    """The same names and shapes, or an error that says which differ from those that are `whose`."""
    missing, surplus = sorted(set(targets) - set(layout)), sorted(set(layout) - set(targets))
    if missing or surplus:
        what = f"lacks {missing[0]}" if missing else f"holds an unknown {surplus[0]}"
        raise UserError(f"{where} does not fit {whose}: it {what}")
    for key, target in targets.items():
        if target.shape != layout[key].shape:
            raise UserError(
                f"{where} does not fit {whose}: {key} has shape "
                f"{tuple(layout[key].shape)}, the model {tuple(target.shape)}"
            )


def read_file(file: Path, targets: Mapping[str, Tensor]) -> None:
    """One tensor at a time, so that a process that keeps a part of each never holds all of them."""
    with safe_open(file, "pt") as source:
        held = set(source.keys())
        for key, target in targets.items():
            whole = source.get_tensor(key)
            if key + _SCALE in held:
                scale = source.get_tensor(key + _SCALE)
                whole = whole.to(scale.dtype) * scale[:, None]
            fill(target, whole)


@torch.no_grad()
def fill(target: Tensor, whole: Tensor) -> None:
    """Copy a tensor, or this process's part of it where the target is sharded."""
    target.copy_(part_like(target, whole) if is_sharded(target) else whole)
