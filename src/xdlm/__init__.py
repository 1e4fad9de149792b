"""xdlm: discrete diffusion language models with masked, uniform, mixed and time-varying noise."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xdlm.errors import UserError

if TYPE_CHECKING:
    from xdlm.api import Model, load
    from xdlm.structs import Vocab

__version__ = "0.1.0"
__all__ = ["Model", "UserError", "Vocab", "__version__", "load"]
#: What pulls in torch and more; imported when first asked for, so that `xdlm --help` is there at once.
_LATE = {"Model": "xdlm.api", "load": "xdlm.api", "Vocab": "xdlm.structs"}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module 'xdlm' has no attribute '{name}'")
