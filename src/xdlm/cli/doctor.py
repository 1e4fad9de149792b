"""`xdlm doctor`: what is installed, and does it work."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from xdlm.cli.options import parse
from xdlm.cli.progress import console
from xdlm.errors import UserError
from xdlm.files import check_writable

_DESCRIPTION = """Say what is installed and whether it works. Exit code 1 if something does not.

examples:
  xdlm doctor
"""
#: Package -> the extra that brings it ("" for the core).
_PACKAGES = {
    "torch": "", "numpy": "", "safetensors": "", "PyYAML": "", "tyro": "", "rich": "",
    "tokenizers": "", "triton": "", "transformers": "text", "datasets": "text", "peft": "text",
    "huggingface-hub": "hub", "pyarrow": "hub",
    "pillow": "image", "lm-eval": "eval", "mauve-text": "eval",
    "fastapi": "serve", "matplotlib": "log", "tensorboard": "log", "wandb": "wandb",
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    pass


def run(arguments: list[str]) -> None:
    parse(Options, arguments, prog="xdlm doctor", description=_DESCRIPTION)
    screen = console(stderr=False)
    screen.print(f"xdlm {metadata_version('xdlm')}, Python {platform.python_version()}, "
                 f"{platform.system()} {platform.machine()}")  # fmt: skip
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    screen.print(f"torch threads: {torch.get_num_threads()}, GPU: {gpu}")
    table = Table("package", "version", "extra", box=None, pad_edge=False)
    for package, extra in _PACKAGES.items():
        version = metadata_version(package)
        table.add_row(package, version or Text("not installed", style="dim"), extra)
    screen.print(table)
    failed = False
    for name, check in _CHECKS.items():
        try:
            outcome = Text.assemble(("ok", "green"), f"  {check()}")
        except UserError as error:
            failed, outcome = True, Text.assemble(("failed", "red"), f"  {error}")
        screen.print(Text(f"{name}: ").append_text(outcome))
    if failed:
        sys.exit(1)


def metadata_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _check_model() -> str:
    from xdlm.api import load

    text = load("pocket").sample(1, steps=4, length=16, seed=0).text[0]
    return f"wrote {text!r}"


def _check_corpus() -> str:
    from xdlm.data import EMBEDDED, read_documents

    sizes = [sum(map(len, read_documents(part))) for part in EMBEDDED]
    return f"{sizes[0]:,} + {sizes[1]:,} characters"


def _check_folder() -> str:
    check_writable(Path.cwd())
    return "writable"


def _check_sandbox() -> str:
    from xdlm.evaluation.sandbox import available_guards, run_code

    run = run_code("assert 1 + 1 == 2")
    if run.verdict != "passed":
        raise UserError(f"a program that must pass has not: {run.why}")
    return f"generated programs would run under {available_guards()}"


_CHECKS: dict[str, Callable[[], str]] = {
    "embedded corpus": _check_corpus,
    "bundled model": _check_model,
    "current folder": _check_folder,
    "sandbox": _check_sandbox,
}
