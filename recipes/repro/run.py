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
from pathlib import Path

from xdlm.cli.lanes import LaneStudy, lane_options, xdlm
from xdlm.report.study.beside import CURVES, SAMPLES, SECONDS, write_curve

HERE = Path(__file__).parent
JUDGE, START = "judge", "mdlm"
#: In the order in which they are trained: what others wait for, and what matters most, comes first.
RUNS = (START, JUDGE, "xdlm-k0.1", "udlm", "adapt-xdlm", "adapt-mdlm", "xdlm-k0.5", "gidd", "xdlm-k0.001",
        "xdlm-k0.9")  # fmt: skip
RECIPES = {run: HERE / f"{run.replace('adapt-', 'adapt/')}.yaml" for run in RUNS}
SPLITS = ("train", "validation")
VALIDATION = "prepared/enwiki2014-validation"
LOGS = Path("runs/repro/logs")


def main() -> None:
    parser = lane_options(str(__doc__), RECIPES, Path("runs/repro/results"))
    parser.add_argument("--judge", nargs="+", default=["ngram"],
                        help="judges of generated text beside the one trained here")  # fmt: skip
    parser.add_argument("--steps", nargs="+", help="numbers of sampling steps at the end",
                        default=["8", "16", "32", "64", "128", "256", "512", "1024"])  # fmt: skip
    parser.add_argument("--early-steps", nargs="+", help="and at checkpoints on the way",
                        default=["8", "32", "128"])  # fmt: skip
    parser.add_argument("--n", default="256", help="texts for each number of steps")
    options = parser.parse_args()
    prepare()
    options.out.mkdir(parents=True, exist_ok=True)
    TextStudy(options).run()


def prepare() -> None:
    """The text, once."""
    for split in SPLITS:
        out = f"prepared/enwiki2014-{split}"
        if not Path(out, "manifest.json").is_file():
            xdlm(LOGS / "prepare.log", "prepare", "--data", f"enwiki2014:{split}", "--tokenizer", "gpt2",
                 "--out", out, "--workers", "8")  # fmt: skip


class TextStudy(LaneStudy):
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        super().__init__(RECIPES, options.runs, logs=LOGS, minutes=options.minutes, lanes=options.lanes,
                         benches=options.benches, times=options.out / SECONDS)  # fmt: skip

    def needs(self, run: str) -> str | None:
        return START if run.startswith("adapt-") else None

    def measure(self, run: str) -> None:
        """Every checkpoint that was kept: perplexity, here and on the zero-shot sets, and generated text.
        The last one in all numbers of steps, with what tokens do in each."""
        self.wait_for(JUDGE)
        options, folder = self._options, str(self.folder(run))
        write_curve(self.folder(run) / "log.jsonl", options.out / CURVES / f"{run}.csv")
        own = [] if self.steps_left(JUDGE) else [str(self.folder(JUDGE))]
        writing = ["--n", options.n, "--precision", options.precision, "--judge", *own, *options.judge,
                   "--records", str(options.out / f"{run}.jsonl")]  # fmt: skip
        reading = ["--data", VALIDATION, "--zero-shot", "--batch", "256", "--max-rows", "512"]
        dynamics = ["eval", "dynamics", folder, *reading, *writing]
        if run == JUDGE:  # it writes nothing
            self.xdlm(f"{run}.measure", *dynamics, "--steps")
            return
        self.xdlm(f"{run}.measure", *dynamics, "--steps", *options.early_steps)
        last = str(self.step_of_newest(run))
        self.xdlm(
            f"{run}.last", *dynamics, "--steps", *options.steps, "--transitions", "--every", last
        )
        if run == START or self.needs(run):
            self._keep_texts(run, "--model", folder)
        if run == START:
            # Its predictions in the reverse process of mixed noise, without any training.
            mixed = ["--model", folder, "--k", "0.1"]
            self.xdlm(f"{run}.as-xdlm", "eval", "gen", *mixed, "--data", VALIDATION, *writing,
                      "--steps", *options.steps)  # fmt: skip
            self._keep_texts(f"{run}-as-xdlm", *mixed)

    def _keep_texts(self, name: str, *words: str) -> None:
        """A few, to be read."""
        self.xdlm(f"{name}.texts", "eval", "gen", *words, "--data", VALIDATION, "--n", "2", "--steps", "8",
                  "16", "32", "64", "--samples", str(self._options.out / SAMPLES / name))  # fmt: skip


if __name__ == "__main__":
    main()
