"""Train the four bundled models alike but for the noise, and export them, within so many minutes.

    python recipes/pocket/run.py --minutes 10 --lanes 4 --novels novels.jsonl.xz

--novels is what `tools/build_corpus.py --all` writes; it is prepared once, into prepared/novels. A run that
came to its end is exported to --out, as the package bundles it, with what its training took in seconds.csv.
Called again, it goes on where it stopped. Logs are in runs/pocket/logs. `tools/model_cards.py` says how the
models are measured and their cards written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from xdlm.cli.lanes import LaneStudy, lane_options
from xdlm.cli.processes import stopped_by_signals, xdlm
from xdlm.report.study.beside import SECONDS

HERE = Path(__file__).parent
RECIPES = {run: HERE / f"{run}.yaml" for run in ("mdlm", "xdlm", "udlm", "judge")}
PREPARED, LOGS = Path("prepared/novels"), Path("runs/pocket/logs")


@stopped_by_signals()
def main() -> None:
    parser = lane_options(str(__doc__), RECIPES, Path("runs/pocket/exported"))
    parser.add_argument("--novels", default="novels.jsonl.xz", help="text, if none is prepared yet")
    parser.add_argument("--dtype", default="int8", help="of the exported weights")
    options = parser.parse_args()
    if not (PREPARED / "manifest.json").is_file():
        xdlm(LOGS / "prepare.log", "prepare", "--data", options.novels, "--tokenizer", "pocket", "--out",
             str(PREPARED))  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    PocketStudy(options).run()


class PocketStudy(LaneStudy):
    def __init__(self, options: argparse.Namespace) -> None:
        self._out, self._dtype = options.out, options.dtype
        super().__init__(RECIPES, options.runs, logs=LOGS, minutes=options.minutes, lanes=options.lanes,
                         benches=options.benches, times=options.out / SECONDS)  # fmt: skip

    def measure(self, run: str) -> None:
        """Export it, if it is done: models that were cut short are not alike."""
        exported = self._out / f"pocket-{run}"
        if self.steps_left(run):
            print(f"{run}: {self.steps_left(run)} steps left, not exported", flush=True)
        elif not exported.exists():
            self.xdlm(f"{run}.export", "export", "--model", str(self.folder(run)), "--out",
                      str(exported), "--dtype", self._dtype)  # fmt: skip


if __name__ == "__main__":
    main()
