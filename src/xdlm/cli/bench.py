"""`xdlm bench`: how fast, how much memory, and how that compares with the straightforward way and
with the trunk alone."""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Column, Table

from xdlm.api import tokenizer_of
from xdlm.cli.options import parse
from xdlm.cli.progress import Show, console, progress
from xdlm.cli.train import make_trainer
from xdlm.config import load_config
from xdlm.errors import UserError, did_you_mean
from xdlm.evaluation.provenance import commit
from xdlm.evaluation.speed import (
    IN_TURN,
    OURS,
    PLAIN,
    TASKS,
    TIMED,
    TRUNK,
    Speed,
    SpeedSetting,
    check_names,
    floor_task,
    measure,
    measure_in_turn,
    repeats_of,
    tasks_of,
)
from xdlm.evaluation.waiting import measure_loader
from xdlm.files import check_file, write_atomic
from xdlm.models import PRESETS, DiTConfig, UNetConfig
from xdlm.tokens.pixels import LEVELS
from xdlm.training.device import describe, pick_device, pick_precision

_DESCRIPTION = """Throughput and peak memory of forward, forward + backward and sampling, for each noise
process, beside a plain implementation (all logits, dense posteriors, float64 Gumbel noise) in the same
run, and beside the bare trunk, without head, loss and draws: the floor under all of them (in training
nearly: a loss leaves out the end of the trunk where the head does not look). On a GPU the paper's setting
is the default; on a CPU a small one is.

examples:
  xdlm bench
  xdlm bench --methods xdlm --tasks train --no-plain
  xdlm bench --csv benchmarks/results.csv --plot bench.png
  xdlm bench --no-plain --in-turn
  xdlm bench --scan vocab --methods xdlm --tasks train
  xdlm bench --preset unet --csv benchmarks/images.csv
  xdlm bench --loader recipes/cpu-tiny.yaml

--loader measures something else: whether reading the data of a recipe holds its training back. It prints
the time of a step with the loader and with a batch held in memory, and their ratio.
"""
_MODELS: dict[str, DiTConfig | UNetConfig] = {
    **PRESETS,
    "unet": UNetConfig(),
    "unet-nano": UNetConfig(side=8, channels=8, multipliers="1-2", blocks=1, attention=4),
}
#: Of a file of results.
_COLUMNS = (
    *(field.name for field in fields(Speed)), "date", "commit", "device", "torch", "triton", "python",
    "dtype", "model", "depth", "width", "vocab", "batch", "length", "steps", "k", "kept_rows", "dropout",
    "compiled", "warmup", "repeats", "sample_repeats",
)  # fmt: skip
#: What --scan goes through: from the setting down to a few per cent of it, and beyond for the vocabulary.
_SCANS = {
    "vocab": ("n_tokens", (1_000, 4_000, 16_000, 64_000, 256_000)),
    "length": ("length", (64, 128, 256, 512, 1024, 2048)),
    "batch": ("batch", (1, 2, 4, 8, 16, 32, 64)),
}


@dataclass(frozen=True)
class Options:
    methods: tuple[str, ...] = TIMED
    """Which noise processes: mdlm, gidd, xdlm, udlm; and trunk, the model without head, loss and draws."""
    tasks: tuple[str, ...] = TASKS
    """Which columns: forward (every row), forward-thinned, train (forward + backward), sample. For the
    trunk: a pass, nothing, a pass forward and backward, as many passes as sampling takes."""
    plain: bool = True
    """Measure the plain implementation too."""
    in_turn: bool = False
    """Time the methods once more when all is done, a run of each after the other, and compare them with the
    first one: a GPU's clock wanders by a few per cent within seconds. All are in memory at once. Not with
    --scan; the plot leaves it out."""
    preset: str | None = None
    """Model size: small, tiny, pocket or nano, DiTs; by default small on a GPU and nano on a CPU. unet and
    unet-nano are models of pixels, which fix the vocabulary and the length."""
    vocab: int | None = None
    """Tokens without the mask; by default 50257 on a GPU and 8192 on a CPU."""
    batch: int | None = None
    """Sequences; by default 32 on a GPU (64 images) and 4 on a CPU."""
    length: int | None = None
    """Tokens per sequence; by default 1024 on a GPU and 64 on a CPU."""
    steps: int = 32
    """Sampling steps; the final denoise comes on top."""
    k: float = 0.1
    """Mixing ratio of xdlm."""
    kept_rows: float = 0.1
    """How often training and forward-thinned look at unchanged tokens, as loss.kept_rows in a recipe: in
    proportion to what they cost, so that it is no share of them; 1 for always."""
    dropout: float = 0.1
    """Dropout in training, as in the paper."""
    warmup: int | None = None
    """Runs before timing starts (of sampling at most 3, and 1 of the plain one); by default 10 on a GPU, as
    in the paper, else 2."""
    repeats: int | None = None
    """Timed runs of forward and train; by default 100 on a GPU, else 5. The plain implementation, which
    is many times slower, is timed a fifth as often."""
    sample_repeats: int | None = None
    """Timed runs of sampling; by default 10 on a GPU, else 2."""
    compile: bool = False
    """Run the trunk through torch.compile instead of the library's own kernels."""
    device: str = "auto"
    """auto, cpu or cuda."""
    csv: str | None = None
    """Append the cells to this file, with hardware, versions and commit."""
    plot: str | None = None
    """Draw the table as a picture."""
    scan: str | None = None
    """Go through sizes of one thing, all else being as set: vocab, length or batch."""
    loader: str | None = None
    """A recipe: measure what reading its data costs a step instead; --repeats steps in each of 5 rounds."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm bench", description=_DESCRIPTION)
    if options.loader is not None:
        _refuse_beside_loader(options)
        _bench_loader(options.loader, options)
        return
    check_names(options.methods, options.tasks)
    if options.in_turn and (len(options.methods) < 2 or options.scan is not None):
        raise UserError("--in-turn compares methods at one size: give at least two, and no --scan")
    setting = _setting(options)
    _check_targets(options)
    measured = _measure_all(_settings(setting, options.scan), options)
    for each, cells in measured:
        _show(cells, each)
    if options.csv is not None:
        n_cells = sum(len(cells) for _, cells in measured)
        console().print(f"{n_cells} rows appended to {options.csv}")
    if options.plot is not None:
        from xdlm.report import plot_scan, plot_speed

        title = describe(setting.device)
        if options.scan is None:
            alone = [cell for cell in measured[0][1] if cell.impl != IN_TURN]
            plot_speed(alone, Path(options.plot), title=title)
        else:
            field = _SCANS[options.scan][0]
            points = [(getattr(each, field), cell) for each, cells in measured for cell in cells]
            plot_scan(points, Path(options.plot), title=title, axis=options.scan)


def _refuse_beside_loader(options: Options) -> None:
    """What would go unheeded: there is no table of methods to write, draw, scan or compare."""
    given = {
        "--csv": options.csv, "--plot": options.plot, "--scan": options.scan,
        "--in-turn": options.in_turn or None,
    }  # fmt: skip
    wrong = [flag for flag, value in given.items() if value is not None]
    if wrong:
        raise UserError(
            f"--loader measures one recipe and no methods: leave out {', '.join(wrong)}"
        )


def _bench_loader(recipe: str, options: Options) -> None:
    config = load_config(recipe)
    config = replace(config, train=replace(config.train, device=options.device, eval_every=0))
    trainer = make_trainer(config, tokenizer_of(config.data))
    steps = options.repeats if options.repeats is not None else 20
    if steps < 1:
        raise UserError(f"repeats must be at least 1, got {steps}")
    with progress(f"rounds of training steps of {recipe}") as show:
        cost = measure_loader(trainer, steps=steps, on_round=show)
    print(
        f"{describe(trainer.device)}: a step takes {cost.with_loader * 1e3:.2f} ms with the loader, "
        f"{cost.held * 1e3:.2f} ms with a batch held in memory: ratio {cost.ratio:.3f}; "
        f"{cost.data_wait:.2%} of the time is waiting for data"
    )


def _check_targets(options: Options) -> None:
    """Before an hour of measuring, not after it."""
    for file in (options.csv, options.plot):
        if file is not None:
            check_file(Path(file))
    if options.csv is not None:
        _rows_so_far(Path(options.csv))


def _rows_so_far(file: Path) -> str:
    """A file of rows, or nothing where there is none; one of something else is refused."""
    try:
        old = file.read_text(encoding="utf-8") if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if old and old.splitlines()[0] != ",".join(_COLUMNS):
        raise UserError(f"{file} has other columns than this version writes; choose another file")
    return old


def _settings(setting: SpeedSetting, scan: str | None) -> list[SpeedSetting]:
    if scan is None:
        return [setting]
    if scan not in _SCANS:
        raise UserError(f"cannot scan '{scan}'{did_you_mean(scan, _SCANS)}")
    field, values = _SCANS[scan]
    if setting.device.type == "cpu":  # half of the grid is enough to see the shape
        values = values[: len(values) // 2 + 1]
    return [replace(setting, **{field: value}) for value in values]  # type: ignore[arg-type]


class _Part(NamedTuple):
    """Cells that are measured together: where memory does not suffice for one, the rest is left out too."""

    name: str
    n_cells: int
    measure: Callable[[SpeedSetting, Callable[[str], None]], Iterator[Speed]]
    """Takes the cells one by one, and what to call with the name of each."""


def _measure_all(
    settings: Sequence[SpeedSetting], options: Options
) -> list[tuple[SpeedSetting, list[Speed]]]:
    """Each cell is kept as soon as it is there: who stops it half-way has half of it."""
    parts = _parts(options)
    measured: list[tuple[SpeedSetting, list[Speed]]] = [(setting, []) for setting in settings]
    before, total = 0, len(settings) * sum(part.n_cells for part in parts)
    with progress("measuring") as show:
        for setting, cells in measured:
            for part in parts:
                count = _Count(show, before, total, _size_scanned(setting, options.scan))
                for cell in _while_memory_lasts(part, setting, count.name):
                    cells.append(cell)
                    count.done += 1
                    if options.csv is not None:
                        _append(Path(options.csv), cell, setting)
                before += part.n_cells
    return measured


def _while_memory_lasts(
    part: _Part, setting: SpeedSetting, on_cell: Callable[[str], None]
) -> Iterator[Speed]:
    try:
        yield from part.measure(setting, on_cell)
    except torch.cuda.OutOfMemoryError:
        console().print(f"{part.name}: out of memory")


@dataclass
class _Count:
    """Says how many cells are done, and which comes now."""

    show: Show
    done: int
    total: int
    where: str

    def name(self, cell: str) -> None:
        self.show(self.done, self.total, cell + self.where)


def _parts(options: Options) -> list[_Part]:
    """Each method in each way; at last all of them in turn."""

    def alone(method: str, impl: str) -> _Part:
        tasks = tasks_of(method, impl, options.tasks)
        return _Part(
            f"{method} {impl}", len(tasks),
            lambda setting, on_cell: measure(method, setting, impl, tasks, on_cell),
        )  # fmt: skip

    impls = (OURS, PLAIN) if options.plain else (OURS,)
    parts = [alone(method, impl) for method in options.methods for impl in impls]
    if options.in_turn:
        parts.append(_Part(
            f"{', '.join(options.methods)} {IN_TURN}",
            sum(len(tasks_of(method, OURS, options.tasks)) for method in options.methods),
            lambda setting, on_cell: measure_in_turn(
                options.methods, setting, options.tasks, on_cell
            ),
        ))  # fmt: skip
    return [part for part in parts if part.n_cells]


def _size_scanned(setting: SpeedSetting, scan: str | None) -> str:
    """The size among those of a scan; nothing without one."""
    return "" if scan is None else f", {scan} {getattr(setting, _SCANS[scan][0]):,}"


def _setting(options: Options) -> SpeedSetting:
    device = pick_device(options.device)
    gpu = device.type == "cuda"
    preset = options.preset or ("small" if gpu else "nano")
    if preset not in _MODELS:
        raise UserError(f"unknown preset '{preset}'{did_you_mean(preset, _MODELS)}")
    model = replace(_MODELS[preset], dropout=options.dropout)
    own_length = model.own_length()
    if own_length is not None and (options.scan or options.vocab or options.length):
        raise UserError(f"{preset} has a vocabulary and a length of its own: leave out --vocab, "
                        "--length and --scan")  # fmt: skip

    def default(given: int | None, on_gpu: int, on_cpu: int) -> int:
        value = given if given is not None else (on_gpu if gpu else on_cpu)
        if value < 1:
            raise UserError("sizes and repeats must be at least 1")
        return value

    if not 0 < options.kept_rows <= 1:
        raise UserError(f"kept_rows must lie in (0, 1], got {options.kept_rows}")
    return SpeedSetting(
        model=model,
        n_tokens=default(options.vocab, 50257, 8192) if own_length is None else LEVELS,
        batch=default(options.batch, 32 if own_length is None else 64, 4),
        length=own_length or default(options.length, 1024, 64),
        steps=options.steps,
        k=options.k,
        kept_rows=options.kept_rows,
        device=device,
        dtype=pick_precision("auto", device),
        compiled=options.compile,
        warmup=default(options.warmup, 10, 2),
        repeats=default(options.repeats, 100, 5),
        sample_repeats=default(options.sample_repeats, 10, 2),
    )


def _show(cells: list[Speed], setting: SpeedSetting) -> None:
    screen = console(stderr=False)
    screen.print(
        f"{describe(setting.device)}, {setting.model.kind} {' x '.join(map(str, _size(setting)))}, "
        f"{setting.n_tokens:,} tokens, batch {setting.batch} x {setting.length}, "
        f"{setting.steps} steps, {str(setting.dtype).removeprefix('torch.')}"
    )
    screen.print(_beside_plain_and_trunk(cells))
    in_turn = [cell for cell in cells if cell.impl == IN_TURN]
    if in_turn:
        screen.print(_compared(in_turn, setting))


def _beside_plain_and_trunk(cells: list[Speed]) -> Table:
    """Our cells, how many times as fast as plain they are, and their time in units of the trunk's; no wider
    than the 80 columns of a log."""
    task = Column("task", no_wrap=True, min_width=max(map(len, TASKS)))
    table = Table(
        "method", task, "tok/s", "plain\ntok/s", "ratio", "of\ntrunk", "peak\nGB", "plain\nGB",
        pad_edge=False, show_edge=False,
    )  # fmt: skip
    plain = {(c.method, c.task): c for c in cells if c.impl == PLAIN}
    floor = {c.task: c for c in cells if c.impl == OURS and c.method == TRUNK}
    for cell in (c for c in cells if c.impl == OURS):
        other = plain.get((cell.method, cell.task))
        trunk = floor.get(floor_task(cell.task)) if cell.method != TRUNK else None
        table.add_row(
            cell.method, cell.task, f"{cell.tokens_per_s:,.0f}",
            f"{other.tokens_per_s:,.0f}" if other else "",
            f"{cell.tokens_per_s / other.tokens_per_s:.2f}" if other else "",
            f"{cell.seconds / trunk.seconds:.2f}" if trunk else "",
            _gb(cell), _gb(other) if other else "",
        )  # fmt: skip
    return table


def _compared(cells: list[Speed], setting: SpeedSetting) -> Table:
    """Methods that took turns, each with the speed of the first one as the unit, and its standard error as
    if runs were independent: what disturbs all of a turn makes that too large."""
    table = Table("in turn", "method", "tok/s", "of the first", "+- se")
    for task in dict.fromkeys(cell.task for cell in cells):
        n = repeats_of(IN_TURN, task, setting)
        first, *others = (cell for cell in cells if cell.task == task)
        table.add_row(task, first.method, f"{first.tokens_per_s:,.0f}", "", "")
        for cell in others:
            ratio = first.seconds / cell.seconds
            error = ratio * sum((c.spread / c.seconds) ** 2 / n for c in (first, cell)) ** 0.5
            table.add_row(
                "",
                cell.method,
                f"{cell.tokens_per_s:,.0f}",
                f"{ratio:.1%}",
                f"{error:.1%}" if n > 1 else "",
            )
    return table


def _size(setting: SpeedSetting) -> tuple[int, int]:
    """Blocks, of a U-Net those of the way down, and width."""
    model = setting.model
    if isinstance(model, UNetConfig):
        return len(model.widths) * model.blocks, model.channels
    return model.depth, model.width


def _gb(cell: Speed) -> str:
    return "" if cell.peak_gb is None else f"{cell.peak_gb:.2f}"


def _triton() -> str:
    """Its version; empty where it is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _append(file: Path, cell: Speed, setting: SpeedSetting) -> None:
    """A row; the whole file is written anew, so that it is never half a row."""
    row = {
        **asdict(cell),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit(),
        "device": describe(setting.device), "torch": torch.__version__, "triton": _triton(),
        "python": platform.python_version(), "dtype": str(setting.dtype), "model": setting.model.kind,
        "depth": _size(setting)[0], "width": _size(setting)[1],
        "vocab": setting.n_tokens, "batch": setting.batch, "length": setting.length,
        "steps": setting.steps, "k": setting.k, "kept_rows": setting.kept_rows,
        "dropout": setting.model.dropout, "compiled": setting.compiled, "warmup": setting.warmup,
        "repeats": repeats_of(cell.impl, "train", setting),
        "sample_repeats": repeats_of(cell.impl, "sample", setting),
    }  # fmt: skip
    old, text = _rows_so_far(file), io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    if not old:
        writer.writeheader()
    writer.writerow(row)
    write_atomic(file, old + text.getvalue())
