"""xdlm: discrete diffusion language models with masked, uniform, mixed and time-varying noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xdlm.errors import UserError
from xdlm.structs import Vocab

if TYPE_CHECKING:
    from xdlm.api import Model, load

__version__ = "0.1.0"
__all__ = ["Model", "UserError", "Vocab", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """`load` and `Model` pull in models and tokenizers; import them when first asked for."""
    if name in ("load", "Model"):
        from xdlm import api

        return getattr(api, name)
    raise AttributeError(f"module 'xdlm' has no attribute '{name}'")
