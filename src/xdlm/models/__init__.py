"""Denoisers."""

from collections.abc import Callable
from typing import Any

from xdlm.models.contract import Denoiser
from xdlm.models.dit import PRESETS, DiT, DiTConfig
from xdlm.models.graphed import run_trunk

#: Configuration -> backbone. A new backbone is one class, its configuration and one line here.
BACKBONES: dict[type, Callable[[Any, int], Denoiser]] = {DiTConfig: DiT}


def build_denoiser(config: DiTConfig, vocab_size: int) -> Denoiser:
    """The backbone that a configuration describes, with fresh weights."""
    return BACKBONES[type(config)](config, vocab_size)


__all__ = ["BACKBONES", "PRESETS", "Denoiser", "DiT", "DiTConfig", "build_denoiser", "run_trunk"]
