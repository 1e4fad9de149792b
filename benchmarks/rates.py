"""What a GPU can do: the rates of large products and of a large copy, on which lower bounds on time rest.

    python benchmarks/rates.py --out benchmarks/h200/rates.jsonl
    python benchmarks/rates.py --small            the same at a toy size, on a CPU too

Products are of bfloat16 numbers with sums in float32; a copy counts what is read and what is written. Each
runs on a GPU for about twice --seconds without a pause, and the second half counts: at its limit of power
it is slower than at first. Clock and power are what `nvidia-smi` says meanwhile, where it is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from xdlm.evaluation.provenance import commit
from xdlm.files import write_atomic
from xdlm.training.device import describe, pick_device

#: Rows, width and columns of products: the head of the paper's model on half of a batch, and a square one.
PRODUCTS, SMALL_PRODUCTS = ((16_384, 768, 50_304), (8192, 8192, 8192)), ((64, 32, 500), (96,) * 3)
COPIED, SMALL_COPIED = 2**30, 2**20
Run = Callable[[], object]
Timed = tuple[float, list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a toy size")
    parser.add_argument("--seconds", type=float, default=3.0, help="of work that counts, about")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="append the figures to this file")
    options = parser.parse_args()
    device = pick_device(options.device)
    if device.type == "cpu" and not options.small:
        parser.error("this is too much for a CPU: add --small")
    about = {"device": describe(device), "torch": torch.__version__, "commit": commit()}
    print(*about.values(), sep=", ")
    rows = []
    for what, unit, size, run in works(device, options.small):
        found = measure(run, options.seconds, device)
        rate = float(f"{size * found['runs'] / found['seconds'] / 1e12:.4g}")
        rows.append({"what": what, "rate": rate, "unit": unit, **found, **about})
        at = f"  {found['mhz']:.0f} MHz  {found['watts']:.0f} W" if found["mhz"] else ""
        print(f"{what:32} {rate:9.4f} {unit:8} {found['seconds']:6.2f} s{at}", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        old = options.out.read_text() if options.out.exists() else ""
        write_atomic(options.out, old + "".join(json.dumps(row) + "\n" for row in rows))


def works(device: torch.device, small: bool) -> Iterator[tuple[str, str, int, Run]]:
    """What is timed, its unit, and how much a run does; of random numbers, since zeros run faster."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    for m, k, n in SMALL_PRODUCTS if small else PRODUCTS:
        a, b = random(m, k), random(n, k)
        run = partial(torch.mm, a, b.T, out=a.new_empty(m, n))
        yield f"product {m:,} x {k:,} x {n:,}", "TFLOP/s", 2 * m * k * n, run
    source = random(SMALL_COPIED if small else COPIED)
    run = partial(torch.empty_like(source).copy_, source)
    yield f"copy of {source.nbytes / 1e9:.3f} GB", "TB/s", 2 * source.nbytes, run


def measure(run: Run, seconds: float, device: torch.device) -> dict[str, float | None]:
    timed = on_gpu if device.type == "cuda" else on_cpu
    timed(run, 1, device)  # the first of a kind takes longer
    n = int(10 * seconds / timed(run, 10, device)[0]) + 1
    taken, told = timed(run, n, device, before=n)
    mhz, watts = map(statistics.fmean, zip(*told, strict=True)) if told else (None, None)
    return {"runs": n, "seconds": round(taken, 6), "mhz": mhz, "watts": watts}


def on_gpu(run: Run, n: int, device: torch.device, before: int = 0) -> Timed:
    """Seconds of `n` runs right behind others that do not count, and clocks and watts meanwhile."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(before + n):
        if i == before:
            start.record()
        run()
    end.record()
    told = []
    while before and (now := clock_and_power(device)) is not None and not end.query():
        if start.query():  # before that it was the work that does not count
            told.append(now)
    end.synchronize()
    return start.elapsed_time(end) / 1e3, told


def on_cpu(run: Run, n: int, *_: object, before: int = 0) -> Timed:
    began = time.perf_counter()
    for _ in range(n):
        run()
    return time.perf_counter() - began, []


def clock_and_power(device: torch.device) -> tuple[float, float] | None:
    """MHz and watts; None where nobody knows."""
    which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    asked = ("--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits")
    try:
        said = subprocess.check_output(["nvidia-smi", which, *asked], text=True)
        mhz, watts = map(float, said.split(","))
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return mhz, watts


if __name__ == "__main__":
    main()
