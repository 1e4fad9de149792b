"""Denoisers."""

from xdlm.models.contract import Denoiser
from xdlm.models.dit import PRESETS, DiT, DiTConfig

__all__ = ["PRESETS", "Denoiser", "DiT", "DiTConfig"]
