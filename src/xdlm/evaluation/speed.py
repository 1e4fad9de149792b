"""Throughput and peak memory of forward, forward + backward and sampling, beside `plain` and a bare trunk.

The paper's table: random tokens, warm-up runs, the mean of the timed ones. Ours and `plain` run one
after the other in the same process on the same weights, so their ratio means something. The trunk with no
head, no loss and no draws behind it is the floor that methods are measured against. Methods that differ
by a few per cent can also be timed in turn, a run of each after the other: the clock of a GPU that is short
of power wanders by as much within seconds, and then it does so for all of them. Who follows whom changes
from turn to turn.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.evaluation.plain import plain_loss, plain_sample
from xdlm.models import Denoiser, DiTConfig, UNetConfig, build_denoiser, run_trunk
from xdlm.models.graphed import release_workspaces
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform
from xdlm.sampling import SamplerConfig, sample
from xdlm.structs import Batch, Vocab
from xdlm.training.device import compile_trunk
from xdlm.training.loss import DiffusionLoss

METHODS = ("mdlm", "gidd", "xdlm", "udlm")
#: The model without head, loss and draws, which is timed as if it were a method.
TRUNK = "trunk"
TIMED = (*METHODS, TRUNK)
THINNED = "forward-thinned"
TASKS = ("forward", THINNED, "train", "sample")
#: What is timed: ours or `plain`, each method alone; or ours once more, the methods in turn.
OURS, PLAIN, IN_TURN = "ours", "plain", "in turn"
#: Sampling is many passes, and needs fewer runs to warm up.
_SAMPLE_WARMUP = {OURS: 3, PLAIN: 1, IN_TURN: 3}
#: Does a task once.
Run = Callable[[], object]


@dataclass(frozen=True)
class SpeedSetting:
    """What is measured."""

    model: DiTConfig | UNetConfig
    n_tokens: int
    batch: int
    length: int
    steps: int
    k: float
    kept_rows: float
    device: torch.device
    dtype: torch.dtype
    compiled: bool
    warmup: int
    repeats: int
    sample_repeats: int


@dataclass(frozen=True)
class Speed:
    """One cell of the table. Memory is the peak allocated on the GPU (None on a CPU, and where several
    methods are there at once)."""

    method: str
    task: str
    impl: str
    tokens_per_s: float
    seconds: float
    spread: float
    peak_gb: float | None


def make_process(method: str, setting: SpeedSetting) -> NoiseProcess:
    n = setting.n_tokens
    if method == "udlm":
        return Uniform(Vocab(n))
    vocab = Vocab(n + 1, mask_id=n)
    processes: dict[str, Callable[[], NoiseProcess]] = {
        "mdlm": lambda: Masked(vocab),
        "gidd": lambda: Gidd(vocab),
        "xdlm": lambda: Mixed(vocab, k=setting.k),
    }
    return processes[method]()


def measure(
    method: str,
    setting: SpeedSetting,
    impl: str,
    tasks: tuple[str, ...] = TASKS,
    on_cell: Callable[[str], None] | None = None,
) -> Iterator[Speed]:
    """All tasks of a method, one after the other, with `impl` "ours" or "plain"."""
    subject = _subject(method, impl, setting)
    for task in tasks_of(method, impl, tasks):
        if on_cell is not None:
            on_cell(f"{method} {impl} {task}")
        run = _task(method, task, impl, *subject, setting)
        yield from _timed({method: run}, task, impl, setting)


def measure_in_turn(
    methods: Sequence[str],
    setting: SpeedSetting,
    tasks: tuple[str, ...] = TASKS,
    on_cell: Callable[[str], None] | None = None,
) -> Iterator[Speed]:
    """All tasks of several methods, a run of each method after the other."""
    subjects = {method: _subject(method, OURS, setting) for method in methods}
    for task in tasks:
        if on_cell is not None:
            on_cell(f"{IN_TURN} {task}")
        runs = {
            method: _task(method, task, OURS, *subject, setting)
            for method, subject in subjects.items()
            if tasks_of(method, OURS, (task,))
        }
        yield from _timed(runs, task, IN_TURN, setting)


def tasks_of(method: str, impl: str, tasks: Sequence[str]) -> tuple[str, ...]:
    """Those that there are: only our loss can be thinned, and of the trunk there is one way to run it."""
    if method == TRUNK and impl == PLAIN:
        return ()
    can_thin = method != TRUNK and impl != PLAIN
    return tuple(task for task in tasks if can_thin or task != THINNED)


def floor_task(task: str) -> str:
    """What the trunk does in a task: a thinned forward pass has no other trunk."""
    return "forward" if task == THINNED else task


def _subject(method: str, impl: str, setting: SpeedSetting) -> tuple[Denoiser, NoiseProcess]:
    process = make_process("xdlm" if method == TRUNK else method, setting)
    torch.manual_seed(0)
    model = build_denoiser(setting.model, process.vocab.size)
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros: they would run faster than real weights
            parameter.add_(0.02 * torch.randn_like(parameter))
    model = model.to(setting.device, setting.dtype)
    model.kernels = impl == OURS
    if impl == OURS and setting.compiled:
        compile_trunk(model)
    return model, process


def repeats_of(impl: str, task: str, setting: SpeedSetting) -> int:
    """How often a task is timed: the plain implementation is many times slower, and as steady."""
    repeats = setting.sample_repeats if task == "sample" else setting.repeats
    return max(1, repeats // 5) if impl == PLAIN else repeats


def _task(
    method: str,
    task: str,
    impl: str,
    model: Denoiser,
    process: NoiseProcess,
    setting: SpeedSetting,
) -> Run:
    """A function that does the task once."""
    model.train(task == "train")  # forward alone is evaluation: no dropout
    if method == TRUNK:
        return _trunk(task, model, process, setting)
    if task == "sample":
        return (_plain_sampling if impl == PLAIN else _sampling)(model, process, setting)
    if impl == PLAIN:
        loss = _plain_loss(model, process, setting)
    else:
        thinned = task in (THINNED, "train")
        loss = _loss(model, process, setting, setting.kept_rows if thinned else 1.0)

    def train() -> None:
        loss().backward()
        model.zero_grad(set_to_none=True)

    return train if task == "train" else torch.no_grad()(loss)


def _trunk(task: str, model: Denoiser, process: NoiseProcess, setting: SpeedSetting) -> Run:
    """One pass over noisy tokens, or as many as sampling takes; in training the way back too, from a sum
    of the states, each with a weight of its own: equal gradients might run faster than real ones."""
    generator = torch.Generator(setting.device).manual_seed(0)
    times = _times(process, setting, generator)
    z, t = process.corrupt(_tokens(setting), times, generator=generator), times.float()
    weight = torch.randn(*z.shape, 1, generator=generator, device=setting.device)

    def train() -> None:
        hidden = run_trunk(model, z, t)
        hidden.backward(weight.to(hidden.dtype).expand_as(hidden))
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def forward() -> None:
        for _ in range(setting.steps + 1 if task == "sample" else 1):
            run_trunk(model, z, t)

    return train if task == "train" else forward


def _sampling(model: Denoiser, process: NoiseProcess, setting: SpeedSetting) -> Run:
    config, seeds = SamplerConfig(steps=setting.steps), count()
    return lambda: sample(
        model, process, batch=setting.batch, length=setting.length, config=config, seed=next(seeds)
    )


def _plain_sampling(model: Denoiser, process: NoiseProcess, setting: SpeedSetting) -> Run:
    generator = torch.Generator(setting.device).manual_seed(0)
    return lambda: plain_sample(
        model, process, batch=setting.batch, length=setting.length, steps=setting.steps,
        generator=generator,
    )  # fmt: skip


def _loss(
    model: Denoiser, process: NoiseProcess, setting: SpeedSetting, kept_rows: float
) -> Callable[[], Tensor]:
    x, index, steps = _tokens(setting), torch.arange(setting.batch), count()
    loss_of = DiffusionLoss(process, kept_rows=kept_rows)

    def loss() -> Tensor:
        step = next(steps)
        batch = Batch(x, index + step * setting.batch)
        return loss_of(model, batch, seed=0, step=step, global_batch=setting.batch).loss

    return loss


def _plain_loss(
    model: Denoiser, process: NoiseProcess, setting: SpeedSetting
) -> Callable[[], Tensor]:
    x, generator = _tokens(setting), torch.Generator(setting.device).manual_seed(0)
    return lambda: plain_loss(model, process, x, _times(process, setting, generator), generator)


def _tokens(setting: SpeedSetting) -> Tensor:
    return torch.randint(
        0, setting.n_tokens, (setting.batch, setting.length), device=setting.device
    )


def _times(process: NoiseProcess, setting: SpeedSetting, generator: torch.Generator) -> Tensor:
    """A time for each sequence, any that the process knows."""
    u = torch.rand(setting.batch, generator=generator, device=setting.device, dtype=torch.float64)
    low, high = process.time_range
    return low + (high - low) * u


def _timed(runs: Mapping[str, Run], task: str, impl: str, setting: SpeedSetting) -> Iterator[Speed]:
    """A cell for each method; where there are several, they take turns."""
    on_gpu = setting.device.type == "cuda"
    if on_gpu:  # what earlier tasks have left, their models and recordings among it
        gc.collect()
        release_workspaces()
        torch.cuda.empty_cache()
    longest = _SAMPLE_WARMUP[impl] if task == "sample" else setting.warmup
    for _ in range(min(setting.warmup, longest)):
        for run in runs.values():
            run()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    repeats, methods = repeats_of(impl, task, setting), [*runs]
    turns = [methods[i] for turn in range(repeats) for i in _order(len(methods), turn)]
    with _without_garbage_collection():
        timed = _seconds_on_gpu if on_gpu else _seconds_on_cpu
        seconds = timed([runs[method] for method in turns])
    peak = _peak_bytes() / 1e9 if on_gpu and impl != IN_TURN else None
    tokens = setting.batch * setting.length
    for method in methods:
        own = [s for other, s in zip(turns, seconds, strict=True) if other == method]
        mean = sum(own) / repeats
        spread = (sum((s - mean) ** 2 for s in own) / max(repeats - 1, 1)) ** 0.5
        yield Speed(method, task, impl, tokens / mean, mean, spread, peak)


def _order(n: int, turn: int) -> list[int]:
    """Who comes when in a turn of `n`: over `n` turns, or twice as many where that is odd, each follows
    each other equally often, and has every place equally often (Williams 1949)."""
    to_and_fro = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]
    order = [(turn + i) % n for i in to_and_fro]
    return order[::-1] if n % 2 and turn // n % 2 else order


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """As `timeit` does: what strikes one run of ten is no property of the code."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _peak_bytes() -> int:
    """The most that was allocated, and what recorded trunks hold for their replays beside it."""
    held = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_pool_id"] != (0, 0)
    )
    return torch.cuda.max_memory_allocated() + held


def _seconds_on_gpu(runs: Sequence[Run]) -> list[float]:
    """Between marks in the GPU's own stream, so that a run may be prepared while the last one ends, as
    in training."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    marks[0].record()
    for run, mark in zip(runs, marks[1:], strict=True):
        run()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def _seconds_on_cpu(runs: Sequence[Run]) -> list[float]:
    seconds = []
    for run in runs:
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return seconds


def check_names(methods: tuple[str, ...], tasks: tuple[str, ...]) -> None:
    for given, known, what in ((methods, TIMED, "method"), (tasks, TASKS, "task")):
        for name in given:
            if name not in known:
                raise UserError(f"unknown {what} '{name}'; known: {', '.join(known)}")
        if len({*given}) < len(given):
            raise UserError(f"a {what} is named twice: {', '.join(given)}")
    if {*methods} == {TRUNK} and {*tasks} == {THINNED}:
        raise UserError(f"the trunk alone has no {THINNED}: name another task or method")
