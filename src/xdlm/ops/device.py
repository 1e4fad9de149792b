"""What the machine can run."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

#: The oldest GPUs that Triton compiles for and that multiply bfloat16, by compute capability.
_OLDEST = (8, 0)


@cache
def kernel_obstacle() -> str | None:
    """Why no kernel can be compiled here; None if they can. XDLM_KERNELS=0 says that none shall be."""
    if os.environ.get("XDLM_KERNELS") == "0":
        return "XDLM_KERNELS is 0"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.is_available() and (own := torch.cuda.get_device_capability()) < _OLDEST:
        needed, has = (".".join(map(str, capability)) for capability in (_OLDEST, own))
        return f"the kernels need a GPU of compute capability {needed}, and this one has {has}"
    return None


def has_triton() -> bool:
    """Whether kernels can be compiled."""
    return kernel_obstacle() is None


def no_autocast(where: Tensor) -> AbstractContextManager[None]:
    """Switches autocast off, so that code computes in the types that it names; meta tensors have none."""
    kind = where.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def given_or(given: Tensor | None, filler: Tensor) -> Tensor:
    """`filler` in place of None: a kernel needs a pointer even for what it will not read."""
    return filler if given is None else given


def multiprocessors(where: Tensor) -> int:
    """How many the GPU of a tensor has; 1 elsewhere, where kernels are only interpreted."""
    if not where.is_cuda:
        return 1
    return torch.cuda.get_device_properties(where.device).multi_processor_count
