"""What the measures share: options, reading text, keeping and showing results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from xdlm.api import Model
from xdlm.cli.progress import progress
from xdlm.data import Rows, load_rows
from xdlm.errors import UserError
from xdlm.evaluation.judges import NGRAM
from xdlm.evaluation.records import EvalRecord, append_records
from xdlm.files import check_writable


@dataclass(frozen=True)
class Running:
    """How a model is run."""

    seed: int = 0
    """Decides times, noise and every draw."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights, or those that training left."""
    device: str = "auto"
    """auto, cpu or cuda."""


@dataclass(frozen=True)
class Reading:
    """How text is measured."""

    length: int | None = None
    """Tokens in a row; by default as in training (1,024 in the papers)."""
    draws: int = 4
    """Times at which the bound's integrand is looked at, per row."""
    max_rows: int | None = None
    """Look at only so many rows of each text."""
    batch: int = 16
    """Rows that go through the model at a time."""


@dataclass(frozen=True)
class Writing:
    """How texts are generated and judged."""

    n: int = 32
    """Texts per number of steps."""
    judge: str = NGRAM
    """ngram, a folder with a causal language model, or a .gguf file."""
    temperature: float = 1.0
    """Below 1 sharpens predictions, above 1 flattens them."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens that holds this probability."""


def read_rows(model: Model, source: str, length: int | None = None) -> Rows:
    data = model.config.data
    with progress(f"reading {source}") as show:
        return load_rows(
            source, model.tokenizer, length or data.length, bos=data.bos, eos=data.eos,
            frame=data.frame, on_progress=show,
        )  # fmt: skip


def packing_rule(model: Model, length: int | None = None) -> str:
    """How documents became rows, in words."""
    data = model.config.data
    ends = {
        (False, False): "nothing between documents",
        (False, True): "the end token after every document",
        (True, False): "the begin token before every document",
        (True, True): "begin and end tokens around every document",
    }[data.bos, data.eos]
    frame = ", every row between a begin and an end token of its own" if data.frame else ""
    return f"rows of {length or data.length:,} tokens, {ends}{frame}"


def keep(file: str | None, *records: EvalRecord) -> None:
    """At once, so that a crash later on costs nothing that was measured."""
    if file is not None:
        append_records(Path(file), records)


def check_target(file: str | None) -> None:
    if file is not None:
        if Path(file).is_dir():
            raise UserError(f"cannot write {file}: it is a folder")
        check_writable(Path(file).absolute().parent)


def show_table(table: Table, title: str) -> None:
    screen = Console()
    if not screen.is_terminal:
        screen.width = max(screen.width, 160)  # a file has room
    screen.print(title, markup=False, highlight=False)
    screen.print(table)


def with_error(value: float | None, stderr: float | None, digits: int = 2) -> str:
    if value is None:
        return "inf"
    return f"{value:.{digits}f}" + ("" if stderr is None else f" ± {stderr:.{digits}f}")
