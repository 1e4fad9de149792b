"""On a CPU at a real vocabulary: the head in blocks beside all rows at once, thinned beside dense sampling.

    python benchmarks/cpu.py --out benchmarks/cpu/cpu.jsonl
    python benchmarks/cpu.py --small              the same at a toy size

`statistics` is `row_stats` alone, for several numbers of rows and widths; `loss` is a forward pass, or a
training step without the optimizer, of a DiT of 2 x 128; `sample` is 64 steps of the same model. Both ways
run by turns in one process; a figure is the best of the runs, of which there are at least --repeats (of
sampling one), and more where they are short. `ratio` is ours by the other: below 1 is faster. `same` is the
other way by itself, the runs of both by turns with the rest: as far from 1 as it is can be mere chance.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch

from xdlm import Vocab
from xdlm.cli.progress import progress
from xdlm.evaluation.provenance import commit
from xdlm.files import write_atomic
from xdlm.models import DiT, DiTConfig
from xdlm.noise import Mixed
from xdlm.ops import row_stats
from xdlm.ops.rows import Impl
from xdlm.sampling import SamplerConfig, sample
from xdlm.structs import Batch
from xdlm.training.loss import DiffusionLoss

Run = Callable[[], object]
Pair = tuple[dict[str, object], Run, Run]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a toy size")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512, 1024, 1536])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 384, 768])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way, at least")
    parser.add_argument("--out", type=Path, help="write the figures to this file")
    parser.add_argument("--seconds", type=float, default=2.0, help="of runs of a pair, at least")
    options = parser.parse_args()
    vocab = Vocab(501, 500) if options.small else Vocab(50_258, 50_257)
    about = {
        "cpu": processor(),
        "torch": torch.__version__,
        "commit": commit(),
        "vocab": vocab.size,
    }
    pairs = [*statistics_pairs(vocab, options.rows, options.widths), *model_pairs(vocab)]
    found: list[dict[str, object]] = []
    with progress("timing") as report:
        for done, (threads, (what, ours, other)) in enumerate(product(options.threads, pairs)):
            report(done, len(pairs) * len(options.threads))
            torch.set_num_threads(threads)
            repeats = 1 if what["task"] == "sample" else options.repeats
            times = compare(ours, other, repeats, options.seconds)
            found.append({"threads": threads, **what, **times, **about})
            if options.out is not None:  # each as soon as it is there
                options.out.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(options.out, "".join(json.dumps(row) + "\n" for row in found))
    for row in found:
        print("  ".join(f"{name} {value}" for name, value in row.items() if name not in about))


def compare(ours: Run, other: Run, repeats: int, enough: float) -> dict[str, object]:
    """The best of each and the ratio; and that of the other way to itself, its runs taken by turns too,
    which says how far a ratio can be trusted. Who comes first changes."""
    runs = {"ours": ours, "other": other}
    if repeats > 1:
        runs["again"] = other
        for run in runs.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    began, names = time.perf_counter(), [*runs]
    while len(seconds["ours"]) < repeats or (
        time.perf_counter() - began < enough and len(seconds["ours"]) < 100
    ):
        for name in names:
            before = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - before)
        names = [*names[1:], names[0]]
    best = {name: round(min(times), 5) for name, times in seconds.items()}
    return {
        "seconds": best["ours"],
        "other": best["other"],
        "ratio": round(best["ours"] / best["other"], 3),
        "same": round(best["again"] / best["other"], 3) if "again" in best else None,
        "repeats": len(seconds["ours"]),
    }


def statistics_pairs(vocab: Vocab, rows: list[int], widths: list[int]) -> Iterator[Pair]:
    for gradients, width, n in product((False, True), widths, rows):
        run = partial(statistics, vocab, n, width, gradients)
        what = {"task": "statistics", "gradients": gradients, "width": width, "rows": n}
        yield what, partial(run, "chunked"), partial(run, "eager")


def statistics(vocab: Vocab, rows: int, width: int, gradients: bool, impl: Impl) -> None:
    hidden, weight = head(vocab.size, width, rows, gradients)
    tokens = torch.arange(rows) % (vocab.size - 2)
    with torch.set_grad_enabled(gradients):
        stats = row_stats(hidden, weight, None, tokens, tokens + 1, torch.zeros(rows),
                          mask_id=vocab.mask_id, impl=impl)  # fmt: skip
        if gradients:
            (stats.lse - stats.logit_x + stats.S).sum().backward()
            hidden.grad = weight.grad = None


_heads: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}


def head(n: int, width: int, rows: int, gradients: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The same states and weight for both ways; only the last are kept."""
    key = (n, width, rows, gradients)
    if key not in _heads:
        _heads.clear()
        torch.manual_seed(0)
        hidden, weight = torch.randn(rows, width), torch.randn(n, width) / width**0.5
        _heads[key] = (hidden.requires_grad_(gradients), weight.requires_grad_(gradients))
    return _heads[key]


def model_pairs(vocab: Vocab) -> Iterator[Pair]:
    torch.manual_seed(0)
    config = DiTConfig(depth=2, width=128, heads=4, cond_width=32, dropout=0.0)
    model, process = DiT(config, vocab.size), Mixed(vocab, k=0.1)
    torch.nn.init.normal_(model.out.weight, std=0.1)
    batch = Batch(torch.randint(0, vocab.size - 1, (4, 64)), torch.arange(4))

    def loss(impl: Impl, gradients: bool) -> None:
        with torch.set_grad_enabled(gradients):
            found = DiffusionLoss(process, impl=impl)(
                model, batch, seed=0, step=0, global_batch=4
            ).loss
        if gradients:
            found.backward()
            model.zero_grad()

    def write(impl: str) -> None:
        sample(model, process, batch=2, length=64, config=SamplerConfig(steps=64, impl=impl))

    for gradients in (False, True):
        yield (
            {"task": "loss", "gradients": gradients, "width": 128, "rows": batch.tokens.numel()},
            partial(loss, "chunked", gradients),
            partial(loss, "eager", gradients),
        )
    yield (
        {"task": "sample", "gradients": False, "width": 128, "rows": 2 * 64},
        partial(write, "thinned"),
        partial(write, "dense"),
    )


def processor() -> str:
    """Its name, where Linux tells it."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


if __name__ == "__main__":
    main()
