"""Where to run, and in what precision."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from xdlm.errors import UserError


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"unknown device '{name}'; use auto, cpu or cuda")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("no CUDA device here; use --device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise UserError(f"no device '{name}': there are {torch.cuda.device_count()} GPUs here")
        torch.cuda.set_device(device)  # kernels launch on the current device
    return device


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def sound_attention() -> Iterator[None]:
    """Attention without cuDNN's kernels, for training.

    A compiled run on an H200 (torch 2.11) went NaN where the same run uncompiled did not. The cause
    has not been pinned down; NaN gradients of cuDNN's attention on Hopper GPUs are reported for several
    shapes (pytorch issue 196678 among others), and without gradients its kernels are right.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
