"""Train the methods of this folder alike within so many minutes, and measure them.

    python recipes/repro/run.py --minutes 25                      everything
    python recipes/repro/run.py --minutes 4 --runs mdlm           one run
    python recipes/repro/run.py --minutes 0                       measure what there is
    python recipes/repro/run.py --minutes 10 --lanes 3 --runs mdlm judge xdlm-k0.1 --seed 1 --last-only \\
        --out results/repro/again                                 three of them trained again

Text is looked for in the folder that XDLM_DATA names (or data/): enwiki2014/*.jsonl.xz, gpt2/ and the
zero-shot sets. With --lanes 2 two runs share the GPU, so that one computes while the other starts; a run is
measured as soon as it is done, beside those that still train. What is left of the minutes is shared among
the runs that have steps left. Called again, it goes on where it stopped, and measures only what it has not.
A budget can be spent in pieces, on one machine or another: of an earlier piece a later one needs the judge
in runs/repro/kept, and what is adapted the run that it starts from. Results are records (JSON lines) under
--out, logs are in runs/repro/logs.

With --seed 1 runs lie in runs/repro/seed-1, with a judge of their own: they are trained with that seed, and
their texts are drawn with it. Text is read as before, so that a report can compare rows with rows. Texts
under --last-only are of the last checkpoint of a run that came to its end, and all that is measured is how
good they are: many more of them can be had in the same time, and on a large GPU more so with
--batch-tokens 262144. A second call with --minutes 0 and --impl gumbel adds texts that the same models
write by float32 noise, as published implementations draw, and one with --impl starved texts of the same law
in a fraction of the time; a report looks for all of them in results/repro/gumbel. What is adapted with
another seed stands beside the first if it is in results/repro/adapted:

    python recipes/repro/run.py --minutes 10 --lanes 3 --runs mdlm judge adapt-mdlm adapt-xdlm --seed 2 \\
        --steps 8 32 --early-steps 8 --n 4096 4096 --out results/repro/adapted
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from threading import Lock

from xdlm.cli.lanes import LaneStudy, lane_options
from xdlm.cli.processes import stopped_by_signals, xdlm
from xdlm.evaluation.records import read_records
from xdlm.evaluation.writing import FOREIGN
from xdlm.report.study.beside import CURVES, SAMPLES, SECONDS, write_curve
from xdlm.sampling.ancestral import STEPS, THINNED
from xdlm.sampling.writing import BATCH_TOKENS

HERE = Path(__file__).parent
JUDGE, START = "judge", "mdlm"
#: In the order in which they are trained: what others wait for, and what matters most, comes first.
RUNS = (START, JUDGE, "xdlm-k0.1", "udlm", "adapt-xdlm", "adapt-mdlm", "xdlm-k0.5", "gidd", "xdlm-k0.001",
        "xdlm-k0.9")  # fmt: skip
RECIPES = {run: HERE / f"{run.replace('adapt-', 'adapt/')}.yaml" for run in RUNS}
SPLITS = ("train", "validation")
VALIDATION = "prepared/enwiki2014-validation"
#: What is written beside the runs.
HOME = Path("runs/repro")
#: The judge in a form that is small enough to keep: runs that are trained later need the same one.
KEPT = "kept"


@stopped_by_signals()
def main() -> None:
    parser = lane_options(str(__doc__), RECIPES, Path("runs/repro/results"))
    parser.add_argument("--judge", nargs="+", default=["ngram"],
                        help="judges of generated text beside the one trained here")  # fmt: skip
    parser.add_argument("--steps", nargs="+", help="numbers of sampling steps at the end",
                        default=["8", "16", "32", "64", "128", "256", "512", "1024"])  # fmt: skip
    parser.add_argument("--early-steps", nargs="+", help="and at checkpoints on the way",
                        default=["8", "32", "128"])  # fmt: skip
    parser.add_argument("--n", nargs="+", help="texts for each number of steps: most where it matters",
                        default=["1024", "512", "512", "256", "256", "128", "128", "512"])  # fmt: skip
    parser.add_argument("--seed", type=int,
                        help="of training and of generated text, other than the recipes'")  # fmt: skip
    parser.add_argument("--last-only", action="store_true",
                        help="measure the last checkpoint alone: no dynamics, no foreign sampler, no kept "
                        "texts, no transitions")  # fmt: skip
    parser.add_argument("--impl", default=THINNED, choices=list(STEPS),
                        help="how tokens are drawn: thinned (exact), gumbel, as published "
                        "implementations do, or starved, by the law of that")  # fmt: skip
    parser.add_argument("--batch-tokens", default=str(BATCH_TOKENS),
                        help="tokens that are sampled together")  # fmt: skip
    options = parser.parse_args()
    early = set() if options.last_only else {*options.early_steps}
    if len(options.n) != len(options.steps) or not early <= {*options.steps}:
        parser.error(
            "--n needs a number for each of --steps, and --early-steps must be among those"
        )
    prepare()
    options.out.mkdir(parents=True, exist_ok=True)
    TextStudy(options).run()


def prepare() -> None:
    """The text, once."""
    for split in SPLITS:
        out = f"prepared/enwiki2014-{split}"
        if not Path(out, "manifest.json").is_file():
            xdlm(HOME / "logs" / "prepare.log", "prepare", "--data", f"enwiki2014:{split}", "--tokenizer",
                 "gpt2", "--out", out, "--workers", "8")  # fmt: skip


class TextStudy(LaneStudy):
    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._keeping = options, Lock()
        self._home = HOME if options.seed is None else HOME / f"seed-{options.seed}"
        super().__init__(RECIPES, options.runs, logs=self._home / "logs", minutes=options.minutes,
                         lanes=options.lanes, benches=options.benches,
                         times=options.out / SECONDS)  # fmt: skip

    def needs(self, run: str) -> str | None:
        return START if run.startswith("adapt-") else None

    def folder(self, run: str) -> Path:
        own = super().folder(run)
        return self._home / own.relative_to(HOME)

    def flags(self, run: str) -> list[str]:
        if self._options.seed is None:
            return []
        start = ["--train.start", str(self.folder(START))] if self.needs(run) else []
        return [
            "--train.seed",
            str(self._options.seed),
            "--train.out",
            str(self.folder(run)),
            *start,
        ]

    def measure(self, run: str) -> None:
        """Every checkpoint that was kept: perplexity, here and on the zero-shot sets, and generated text.
        The last one in all numbers of steps, with what tokens do in each."""
        options, folder = self._options, str(self.folder(run))
        if options.last_only and self.steps_left(run):
            print(f"{run}: {self.steps_left(run)} steps left, not measured", flush=True)
            return
        write_curve(self.folder(run) / "log.jsonl", options.out / CURVES / f"{run}.csv")
        records = ["--records", str(options.out / f"{run}.jsonl")]
        names = [*self._own_judge(), *options.judge]
        judges = ["--precision", options.precision, "--judge", *names]
        rows = ["--batch", "256", "--max-rows", "512", "--row-nats"]
        reading = ["--data", VALIDATION, "--zero-shot", *rows]
        dynamics = ["eval", "dynamics", folder, *reading, *judges, *records]
        at_last = ["--every", str(self.step_of_newest(run))]
        if run == JUDGE:  # it writes nothing
            self.xdlm(
                f"{run}.measure", *dynamics, "--steps", *(at_last if options.last_only else ())
            )
            return
        whole = [*self._writing(options.steps), *at_last]
        if options.last_only:
            way = "" if options.impl == THINNED else f".{options.impl}"
            self.xdlm(f"{run}.last{way}", *dynamics, *whole)
            return
        self.xdlm(f"{run}.last", *dynamics, *whole, "--transitions")
        self.xdlm(f"{run}.measure", *dynamics, *self._writing(options.early_steps))
        if run == START or self.needs(run):
            self._keep_texts(run, "--model", folder)
        if run == START:
            # Its predictions in the reverse process of mixed noise, without any training.
            mixed = ["--model", folder, "--k", "0.1"]
            self._keep_texts(f"{run}-as-xdlm", *mixed)
            if self._is_resampled(options.out / f"{run}.jsonl", len(names)):
                return
            self.xdlm(f"{run}.as-xdlm", "eval", "gen", *mixed, "--data", VALIDATION, *judges, *records,
                      *self._writing(options.steps))  # fmt: skip

    def _is_resampled(self, records: Path, judges: int) -> bool:
        """Whether texts of another process were measured before, by as many judges."""
        read = read_records(records) if records.is_file() else []
        done = Counter(
            (str(r.steps), str(r.n))
            for r in read if r.metric == "gen_ppl" and FOREIGN in (r.sampler or "")
        )  # fmt: skip
        wanted = zip(self._options.steps, self._options.n, strict=True)
        return all(done[place] >= judges for place in wanted)

    def _own_judge(self) -> list[str]:
        """The one that was trained here, or kept from before; none, if it did not come to its end."""
        self.wait_for(JUDGE)
        kept = self._home / KEPT / JUDGE
        with self._keeping:
            if not kept.exists() and not self.steps_left(JUDGE):
                self.xdlm(f"{JUDGE}.export", "export", "--model", str(self.folder(JUDGE)), "--out",
                          str(kept), "--dtype", "int8")  # fmt: skip
        return [str(kept)] if kept.exists() else []

    def _writing(self, steps: list[str]) -> list[str]:
        options = self._options
        texts = dict(zip(options.steps, options.n, strict=True))
        seed = [] if options.seed is None else ["--text-seed", str(options.seed)]
        return ["--batch-tokens", options.batch_tokens, *seed, "--impl", options.impl, "--steps", *steps,
                "--n", *(texts[number] for number in steps)]  # fmt: skip

    def _keep_texts(self, name: str, *words: str) -> None:
        """A few, to be read."""
        if len([*(self._options.out / SAMPLES / name).glob("steps-*.jsonl")]) == 4:
            return
        few = ["--n", "2", "--steps", "8", "16", "32", "64", "--impl", self._options.impl]
        self.xdlm(f"{name}.texts", "eval", "gen", *words, "--data", VALIDATION, *few, "--samples",
                  str(self._options.out / SAMPLES / name))  # fmt: skip


if __name__ == "__main__":
    main()
