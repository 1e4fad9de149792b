"""The model hub's library, where it is installed: quiet, and with one line for whatever goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from xdlm.errors import UserError


@contextmanager
def hub_library(absent: str, repository: str) -> Iterator[ModuleType]:
    """`huggingface_hub`, to fetch a repository with; `absent` begins the message if that fails."""
    try:
        import huggingface_hub
        from huggingface_hub.utils import logging
    except ImportError as error:
        raise UserError(f"{absent}; to fetch it from the hub install xdlm[hub]") from error
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield huggingface_hub
    except UserError:
        raise
    except Exception as error:  # the library raises whatever its network layers do
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{absent}, and {repository} cannot be fetched: {reason}") from error
    finally:
        logging.set_verbosity(before)
