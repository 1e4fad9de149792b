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
#: Packages that are there as `xdlm.noise` after a mere `import xdlm`, and imported as late.
_PARTS = ("data", "evaluation", "models", "noise", "objective", "ops", "report", "sampling", "tokens",
          "training")  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    if name in _PARTS:
        return import_module(f"xdlm.{name}")
    raise AttributeError(f"module 'xdlm' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE, *_PARTS})
