"""Train the methods of this folder alike and measure them, within so many minutes.

    python recipes/repro/run.py --minutes 25                      everything
    python recipes/repro/run.py --minutes 4 --runs mdlm           one run
    python recipes/repro/run.py --minutes 0                       measure what there is

Text is looked for in the folder that XDLM_DATA names (or data/): enwiki2014/*.jsonl.xz, gpt2/ and the
zero-shot sets. With --lanes 2 two runs share the GPU, so that one computes while the other starts; a run is
measured as soon as it is done, beside those that still train. What is left of the minutes is shared among
the runs that have steps left. Called again, it goes on where it stopped, and measures only what it has not.
Results are records (JSON lines) under --out, logs are in runs/repro/logs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from xdlm.config import load_config
from xdlm.training.checkpoint import latest_checkpoint, open_checkpoint

HERE = Path(__file__).parent
JUDGE, START = "judge", "mdlm"
#: In the order in which they are trained: what others wait for, and what matters most, comes first.
RUNS = (START, JUDGE, "xdlm-k0.1", "udlm", "adapt-xdlm", "adapt-mdlm", "xdlm-k0.5", "gidd", "xdlm-k0.001",
        "xdlm-k0.9")  # fmt: skip
SPLITS = ("train", "validation")
VALIDATION = "prepared/enwiki2014-validation"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, required=True, help="for all training together")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--lanes", type=int, default=1, help="runs that train at a time")
    parser.add_argument("--benches", type=int, default=1, help="runs that are measured at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/repro/results"))
    parser.add_argument("--judge", nargs="+", default=["ngram"],
                        help="judges of generated text beside the one trained here")  # fmt: skip
    parser.add_argument("--steps", nargs="+", help="numbers of sampling steps at the end",
                        default=["8", "16", "32", "64", "128", "256", "512", "1024"])  # fmt: skip
    parser.add_argument("--early-steps", nargs="+", help="and at checkpoints on the way",
                        default=["8", "32", "128"])  # fmt: skip
    parser.add_argument("--n", default="256", help="texts for each number of steps")
    parser.add_argument("--precision", default="float32", help="of the trunk, in measuring")
    options = parser.parse_args()
    prepare()
    options.out.mkdir(parents=True, exist_ok=True)
    Study(options).run()


def prepare() -> None:
    """The text, once."""
    for split in SPLITS:
        out = f"prepared/enwiki2014-{split}"
        if not Path(out, "manifest.json").is_file():
            xdlm("prepare", "prepare", "--data", f"enwiki2014:{split}", "--tokenizer", "gpt2", "--out",
                 out, "--workers", "8")  # fmt: skip


class Study:
    """Runs that train in lanes, each measured when it is done."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end = time.monotonic() + 60 * options.minutes
        self._waiting = [run for run in RUNS if run in options.runs and steps_left(run)]
        self._trained: dict[str, Future[None]] = {}

    def run(self) -> None:
        options = self._options
        with (
            ThreadPoolExecutor(options.lanes) as lanes,
            ThreadPoolExecutor(options.benches) as benches,
        ):
            self._trained = {run: lanes.submit(self._train, run) for run in list(self._waiting)}
            measured = [benches.submit(self._measure, run) for run in RUNS if run in options.runs]
            for work in (*self._trained.values(), *measured):
                work.result()

    def _train(self, run: str) -> None:
        """Until it is done, or its share of what is left of the time is."""
        if run.startswith("adapt-"):
            self._wait_for(START)
        share = (self._end - time.monotonic()) * self._options.lanes / len(self._waiting)
        self._waiting.remove(run)
        if share <= 0 or (run.startswith("adapt-") and steps_left(START)):
            return
        more = ["--resume"] if latest_checkpoint(run_folder(run)) is not None else []
        xdlm(run, "train", recipe(run), "--train.minutes", f"{share / 60:.4f}", *more)

    def _measure(self, run: str) -> None:
        """Every checkpoint that was kept: perplexity, here and on the zero-shot sets, and generated text.
        The last one in all numbers of steps, with what tokens do in each."""
        self._wait_for(run)
        self._wait_for(JUDGE)
        if latest_checkpoint(run_folder(run)) is None:
            return
        options = self._options
        own = [] if steps_left(JUDGE) else [str(run_folder(JUDGE))]
        writing = ["--n", options.n, "--precision", options.precision, "--judge", *own, *options.judge,
                   "--records", str(options.out / f"{run}.jsonl")]  # fmt: skip
        reading = ["--data", VALIDATION, "--zero-shot", "--batch", "256", "--max-rows", "512"]
        dynamics = ["eval", "dynamics", str(run_folder(run)), *reading, *writing]
        if run == JUDGE:  # it writes nothing
            xdlm(f"{run}.measure", *dynamics, "--steps")
            return
        xdlm(f"{run}.measure", *dynamics, "--steps", *options.early_steps)
        last = str(step_of_newest(run))
        xdlm(f"{run}.last", *dynamics, "--steps", *options.steps, "--transitions", "--every", last)
        if (
            run == START
        ):  # its predictions in the reverse process of mixed noise, without any training
            xdlm(f"{run}.as-xdlm", "eval", "gen", "--model", str(run_folder(run)), "--data", VALIDATION,
                 *writing, "--k", "0.1", "--steps", *options.steps)  # fmt: skip

    def _wait_for(self, run: str) -> None:
        """Whether it succeeds or not; what it left says how far it came."""
        if run in self._trained:
            wait([self._trained[run]])


def steps_left(run: str) -> int:
    return load_config(recipe(run)).train.steps - step_of_newest(run)


def step_of_newest(run: str) -> int:
    newest = latest_checkpoint(run_folder(run))
    return 0 if newest is None else open_checkpoint(newest).step


def run_folder(run: str) -> Path:
    return Path(load_config(recipe(run)).train.out)


def recipe(run: str) -> str:
    return str(HERE / f"{run.replace('-', '/', 1) if run.startswith('adapt-') else run}.yaml")


def xdlm(log: str, *words: str) -> None:
    """A command of its own, whose output goes to a file: several may run at a time."""
    file = Path("runs/repro/logs", f"{log}.log")
    file.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    print("$ xdlm", *words, f"(-> {file})", flush=True)
    with file.open("a") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "xdlm.cli.main", *words],
            stdout=stream,
            stderr=stream,
            check=False,
        )
    print(f"{log}: {time.monotonic() - began:.0f} s, exit code {done.returncode}", flush=True)
    if done.returncode:
        sys.exit(f"{log} failed: {file.read_text().splitlines()[-1:]}")


if __name__ == "__main__":
    main()
