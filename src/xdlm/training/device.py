"""Where to run, and in what precision."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import torch

from xdlm.errors import UserError
from xdlm.models import Denoiser

#: Without one of the compiler's fusions: since torch 2.10 it gives wrong gradients to norms that are
#: modulated as a DiT's are, garbage that soon turns into NaN (pytorch issue 193061).
COMPILER_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "triton.mix_order_reduction": False
}


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = re.fullmatch(r"cpu|cuda(?::(0|[1-9]\d*))?", name)
    if found is None:
        raise UserError(f"unknown device '{name}'; use auto, cpu or cuda")
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise UserError("no CUDA device here; ask for the device cpu")
    # torch would take a number modulo 256.
    if int(found[1] or 0) >= torch.cuda.device_count():
        raise UserError(f"no device '{name}': there are {torch.cuda.device_count()} GPUs here")
    device = torch.device(name)
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels launch on the current device
    return device


def pick_own_device(name: str) -> torch.device:
    """The same for one of several processes that train together: each has a GPU of its own, as `torchrun`
    numbers them, where none is named."""
    if name in ("auto", "cuda") and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        name = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    return pick_device(name)


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def place(denoiser: Denoiser, device: torch.device) -> None:
    """Move a model to a device. Where it has no memory yet (meta) it gets some there, of any content."""
    if denoiser.device.type == "meta":
        denoiser.to_empty(device=device)
    else:
        denoiser.to(device)


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compile_trunk(denoiser: Denoiser) -> None:
    """Run the trunk through torch.compile from now on."""
    denoiser.replayable = False
    denoiser.trunk = torch.compile(denoiser.trunk, options=COMPILER_OPTIONS)  # type: ignore[method-assign]
