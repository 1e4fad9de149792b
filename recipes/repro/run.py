"""Train the methods of this folder alike and measure them, within so many minutes.

    python recipes/repro/run.py --minutes 25                            all methods
    python recipes/repro/run.py --minutes 4 --methods mdlm              one of them
    python recipes/repro/run.py --minutes 4 --methods judge             the judge of their texts
    python recipes/repro/run.py --minutes 0 --judge judge models/gpt2   measure what there is

Text is looked for in the folder that XDLM_DATA names (or data/): enwiki2014/*.jsonl.xz, gpt2/ and the
zero-shot sets. What is left of the minutes is shared among the methods that have steps left. Run again, it
goes on where it stopped, and measures only what it has not. Results are records (JSON lines) under --out.

The judge is an autoregressive model that is trained as the methods are; all judges see the same texts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from xdlm.config import load_config
from xdlm.training.checkpoint import latest_checkpoint, open_checkpoint

HERE = Path(__file__).parent
#: The judge is trained as the methods are; it writes no text.
JUDGE = "judge"
METHODS = tuple(sorted(file.stem for file in HERE.glob("*.yaml") if file.stem != JUDGE))
SPLITS = ("train", "validation")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, required=True, help="for all training together")
    parser.add_argument(
        "--methods", nargs="+", choices=(JUDGE, *METHODS), default=[JUDGE, *METHODS]
    )
    parser.add_argument("--out", type=Path, default=Path("runs/repro/results"))
    parser.add_argument(
        "--judge", nargs="+", default=["ngram"],
        help=f"one or several, as for xdlm eval gen; {JUDGE} is the one that is trained here",
    )  # fmt: skip
    parser.add_argument("--steps", nargs="+", default=["8", "16", "32", "64", "128", "256"])
    parser.add_argument("--n", default="64", help="texts for each number of steps")
    options = parser.parse_args()
    prepare()
    train(options.methods, 60 * options.minutes)
    options.out.mkdir(parents=True, exist_ok=True)
    judges = [str(run_folder(JUDGE)) if name == JUDGE else name for name in options.judge]
    if JUDGE in options.judge and steps_left(JUDGE):
        # Results under a judge that goes on learning do not compare.
        raise SystemExit(f"the judge has {steps_left(JUDGE)} steps left: train it to its end first")
    for method in options.methods:
        measure(method, judges, options)


def prepare() -> None:
    """The text, once."""
    for split in SPLITS:
        out = f"prepared/enwiki2014-{split}"
        if not Path(out, "manifest.json").is_file():
            xdlm("prepare", "--data", f"enwiki2014:{split}", "--tokenizer", "gpt2", "--out", out,
                 "--workers", "8")  # fmt: skip


def train(methods: list[str], seconds: float) -> None:
    """Each method that has steps left gets its share of what is left of the time."""
    end = time.monotonic() + seconds
    unfinished = [method for method in methods if steps_left(method)]
    for i, method in enumerate(unfinished):
        share = (end - time.monotonic()) / (len(unfinished) - i)
        if share <= 0:
            return
        more = ["--resume"] if latest_checkpoint(run_folder(method)) is not None else []
        xdlm("train", recipe(method), "--train.minutes", f"{share / 60:.4f}", *more)


def measure(method: str, judges: list[str], options: argparse.Namespace) -> None:
    """Every checkpoint that was kept: perplexity, here and on the zero-shot sets, and generated text."""
    if latest_checkpoint(run_folder(method)) is None:
        return
    data = "prepared/enwiki2014-validation"
    steps = [] if method == JUDGE else options.steps
    xdlm("eval", "dynamics", str(run_folder(method)), "--data", data, "--zero-shot", "--steps",
         *steps, "--n", options.n, "--judge", *judges, "--records",
         str(options.out / f"{method}.jsonl"))  # fmt: skip


def steps_left(method: str) -> int:
    newest = latest_checkpoint(run_folder(method))
    done = 0 if newest is None else open_checkpoint(newest).step
    return load_config(recipe(method)).train.steps - done


def run_folder(method: str) -> Path:
    return Path(load_config(recipe(method)).train.out)


def recipe(method: str) -> str:
    return str(HERE / f"{method}.yaml")


def xdlm(*words: str) -> None:
    print("$ xdlm", *words, flush=True)
    subprocess.run([sys.executable, "-m", "xdlm.cli.main", *words], check=True)


if __name__ == "__main__":
    main()
