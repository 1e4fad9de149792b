"""Denoisers."""

from collections.abc import Callable

from xdlm.models.contract import Denoiser
from xdlm.models.dit import PRESETS, DiT, DiTConfig
from xdlm.models.graphed import run_trunk

#: Configuration -> backbone. A new backbone is one class, its configuration and one line here.
BACKBONES: dict[type, Callable[..., Denoiser]] = {DiTConfig: DiT}


def build_denoiser(config: DiTConfig, vocab_size: int, *, causal: bool = False) -> Denoiser:
    """The backbone that a configuration describes, with fresh weights."""
    return BACKBONES[type(config)](config, vocab_size, causal=causal)


__all__ = ["BACKBONES", "PRESETS", "Denoiser", "DiT", "DiTConfig", "build_denoiser", "run_trunk"]
