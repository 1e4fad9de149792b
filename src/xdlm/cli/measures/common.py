"""What the measures share: options, reading text, keeping and showing results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

from xdlm.api import MAX_LENGTH, MAX_SAMPLES, Model, load
from xdlm.cli.progress import console, progress, waiting
from xdlm.config import RunConfig
from xdlm.data import EMBEDDED, Rows, load_rows
from xdlm.errors import UserError, check_seed
from xdlm.evaluation.judges import NGRAM
from xdlm.evaluation.records import EvalRecord, append_records, check_records
from xdlm.files import check_file, explained
from xdlm.report import tables
from xdlm.sampling import THINNED, Filter, SamplerConfig
from xdlm.sampling.writing import BATCH_TOKENS

#: Columns of a screen that nothing is too wide for.
_ENDLESS = 100_000


@dataclass(frozen=True)
class Running:
    """How a model is run."""

    seed: int = 0
    """Decides times, noise and every draw."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights (ema), or the last ones of training (raw)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the trunk computes in; every result says which. Methods compare at the same one only."""
    device: str = "auto"
    """auto, cpu or cuda."""
    length: int | None = None
    """Tokens in a row of text and in a generated text; by default as in training (1,024 in the papers)."""


@dataclass(frozen=True)
class Reading:
    """How text is measured."""

    draws: int = 4
    """Times at which the bound's integrand is looked at, per row."""
    max_rows: int | None = None
    """Measure at most this many rows of each text."""
    batch: int = 16
    """Rows that go through the model at a time."""
    row_nats: bool = False
    """Record what each row came to, too: a report then compares models row by row, which tells small
    differences from chance."""


@dataclass(frozen=True)
class Writing:
    """How texts are generated and judged."""

    steps: tuple[int, ...] = (32,)
    """Numbers of sampling steps; none to generate nothing. The final denoise comes on top."""
    n: tuple[int, ...] = (32,)
    """Texts per number of steps: one number for all, or one for each."""
    judge: tuple[str, ...] = (NGRAM,)
    """One or several, who judge the same texts: ngram, an autoregressive model of this library (a bundled
    name, a checkpoint folder or a run folder), a folder with a causal language model, or a .gguf file."""
    temperature: float = 1.0
    """Below 1 sharpens predictions, above 1 flattens them; 0 takes the most likely token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens that holds this probability."""
    impl: str = THINNED
    """How tokens are drawn: thinned is fast, dense its slow twin of the same law; gumbel draws as published
    implementations do, by float32 noise that starves rare tokens; starved has nearly the law of that
    noise, and is several times as fast."""
    transitions: bool = False
    """Count what tokens do at each step too: appear, change, be masked again."""
    batch_tokens: int = BATCH_TOKENS
    """Tokens that are sampled together; a large GPU is faster with more. Texts stay the same, up to the
    model's own rounding."""
    text_seed: int | None = None
    """Decides the draws of generated texts, if --seed shall not: rows that are read stay comparable."""

    def texts(self, steps: int) -> int:
        """How many are generated in so many steps."""
        return self.n[0] if len(self.n) == 1 else self.n[self.steps.index(steps)]


def check_settings(options: Running) -> None:
    """Numbers that cannot be, before anything is opened or written."""
    check_seed(options.seed, name="--seed")
    if options.length is not None and not 1 <= options.length <= MAX_LENGTH:
        raise UserError(f"--length must lie in 1..{MAX_LENGTH:,}, got {options.length}")
    if isinstance(options, Reading):
        if min(options.draws, options.batch) < 1:
            raise UserError("--draws and --batch must be at least 1")
        if options.max_rows is not None and options.max_rows < 1:
            raise UserError(f"--max-rows must be at least 1, got {options.max_rows}")
    if isinstance(options, Writing):
        if options.text_seed is not None:
            check_seed(options.text_seed, name="--text-seed")
        if options.batch_tokens < 1:
            raise UserError(f"--batch-tokens must be at least 1, got {options.batch_tokens}")
        for n in options.n:
            if not 1 <= n <= MAX_SAMPLES:
                raise UserError(f"--n must lie in 1..{MAX_SAMPLES:,}, got {n}")
        if len(options.n) != 1 and len(options.n) != len(options.steps):
            raise UserError(
                f"--n needs one number, or one for each of the {len(options.steps)} of --steps, got "
                f"{len(options.n)}"
            )
        if not options.judge or len(set(options.judge)) < len(options.judge):
            raise UserError("--judge needs at least one name, and each only once")
        prediction = Filter(options.temperature, options.top_p)
        for steps in options.steps:
            SamplerConfig(steps, prediction, impl=options.impl)


def opened(name: str | Path, options: Running) -> Model:
    with waiting(f"reading {name}"):
        return load(
            name, device=options.device, weights=options.weights, precision=options.precision
        )


def own_text(config: RunConfig) -> str:
    """What a model is measured on unless told otherwise: the text that validated its training."""
    return config.data.val if config.data.val is not None else EMBEDDED[1]


def read_rows(model: Model, source: str, length: int | None = None) -> Rows:
    data = model.config.data
    try:
        with progress(f"reading {source}") as show:
            return load_rows(
                source, model.tokenizer, data.length if length is None else length, bos=data.bos,
                eos=data.eos, frame=data.frame, on_progress=show,
            )  # fmt: skip
    except UserError as error:
        if source != data.val:
            raise
        raise UserError(f"{error} (the model's validation text; --data names another)") from error


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
    return f"rows of {data.length if length is None else length:,} tokens, {ends}{frame}"


def keep(file: str | None, *records: EvalRecord) -> None:
    """At once, so that a crash later on costs nothing that was measured."""
    if file is not None:
        with explained(Path(file)):
            Path(file).absolute().parent.mkdir(parents=True, exist_ok=True)
        append_records(Path(file), records)


def check_target(file: str | None) -> None:
    """That records can be kept there: before anything is measured, not after."""
    if file is not None:
        check_file(Path(file))
        check_records(Path(file))


def show_table(table: Table, title: str, *remarks: str) -> None:
    screen = console(stderr=False)
    if not screen.is_terminal:
        screen.width = max(screen.width, 160)  # a file has room
    screen.print(title)
    fits = (
        screen.measure(table, options=screen.options.update(width=_ENDLESS)).maximum <= screen.width
    )
    screen.print(table if fits else turned(table))
    for remark in remarks:
        screen.print(remark)


def turned(table: Table) -> Table:
    """Lines as columns: for a table that is too wide to be read, and not as long."""
    heads, *rows = zip(*([column.header, *column.cells] for column in table.columns), strict=True)
    if len(rows) >= len(heads):
        return table
    first, *others = heads
    found = Table(first, *(row[0] for row in rows))
    for place, head in enumerate(others, start=1):
        found.add_row(head, *(row[place] for row in rows))
    return found


def with_error(value: float | None, stderr: float | None, digits: int = 2) -> str:
    """As in a report, but without an error that is not known: a remark below the table says why."""
    return tables.with_error(value, stderr if is_known(stderr) else None, digits)


def is_known(stderr: float | None) -> bool:
    """One measurement does not say how much others would differ."""
    return stderr is not None and math.isfinite(stderr)
