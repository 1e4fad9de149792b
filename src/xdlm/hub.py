"""The model hub's library, where it is installed: quiet, and with one line for whatever goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

from xdlm.errors import UserError


@contextmanager
def hub_library(
    situation: str, repository: str, *, to: str = "fetch it from", done: str = "fetched"
) -> Iterator[ModuleType]:
    """`huggingface_hub`, to do something with a repository; the situation begins the message if that
    fails."""
    try:
        import huggingface_hub
        from huggingface_hub.utils import logging
    except ImportError as error:
        raise UserError(f"{situation}; to {to} the hub install xdlm[hub]") from error
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield huggingface_hub
    except UserError:
        raise
    except Exception as error:  # the library raises whatever its network layers do
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{situation}, and {repository} cannot be {done}: {reason}") from error
    finally:
        logging.set_verbosity(before)


def check_push(repository: str) -> None:
    """What can be known without a network: that there is the library, a name and a token."""
    with _pushing("nothing is written", repository) as hub:
        if repository.count("/") != 1:
            raise UserError(f"a repository is owner/name, got '{repository}'")
        hub.utils.validate_repo_id(repository)
        if hub.get_token() is None:
            raise UserError(
                "the hub wants a token: set HF_TOKEN, or log in with `hf auth login`; nothing is written"
            )


def push_folder(folder: Path, repository: str, *, private: bool = False) -> str:
    """Put a folder's files into a model repository, which is made if it is not there, and say where."""
    with _pushing(f"{folder} is written", repository) as hub:
        api = hub.HfApi()
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            folder_path=folder, repo_id=repository, commit_message="Weights, written by xdlm"
        )
        return str(url)


def _pushing(situation: str, repository: str) -> AbstractContextManager[ModuleType]:
    return hub_library(situation, repository, to="push it to", done="pushed to")
