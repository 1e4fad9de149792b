"""What the machine can run."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled; XDLM_KERNELS=0 says that they shall not be."""
    return os.environ.get("XDLM_KERNELS") != "0" and find_spec("triton") is not None


def given_or(given: Tensor | None, filler: Tensor) -> Tensor:
    """A kernel needs some pointer, even where it will not look."""
    return filler if given is None else given


def multiprocessors(where: Tensor) -> int:
    """Of the GPU that holds a tensor; 1 elsewhere, where kernels are only interpreted."""
    if not where.is_cuda:
        return 1
    return torch.cuda.get_device_properties(where.device).multi_processor_count
