"""`xdlm eval dynamics`: how models came to be what they are, checkpoint by checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from rich.table import Table

from xdlm.api import Model, load
from xdlm.cli.measures import gen, ppl
from xdlm.cli.measures.common import (
    Reading,
    Running,
    Writing,
    check_target,
    keep,
    packing_rule,
    read_rows,
    show_table,
    with_error,
)
from xdlm.cli.options import parse
from xdlm.data import ZERO_SHOT, Rows
from xdlm.errors import UserError
from xdlm.evaluation.judges import Judge, open_judge
from xdlm.evaluation.records import EvalRecord, measurement, resume_records
from xdlm.training.checkpoint import run_checkpoints, step_of

_DESCRIPTION = """Perplexity of text, and quality of generated text, at every checkpoint of one or several
training runs. Results are appended to --records as they come; called again, it goes on where it stopped and
looks at new checkpoints only. `xdlm report` draws them against the training step.

Training keeps the newest checkpoints alone, unless --train.keep-every says which others to keep.

examples:
  xdlm train recipes/cpu-tiny.yaml --train.keep-every 250
  xdlm eval dynamics runs/cpu-tiny --records dynamics.jsonl
  xdlm eval dynamics runs/mdlm runs/xdlm --every 100000 --steps 128 --judge models/gpt2-large
  xdlm report --records dynamics.jsonl --out report/
"""


@dataclass(frozen=True)
class Options(Running, Reading, Writing):
    records: str = "dynamics.jsonl"
    """Append the results to this file, one line of JSON each, and skip what it holds already."""
    data: tuple[str, ...] = ("corpus:heldout",)
    """Texts whose perplexity to measure; the first one is also the real text beside generated ones."""
    zero_shot: bool = False
    """Measure the papers' seven zero-shot sets too, and their mean."""
    steps: tuple[int, ...] = (32,)
    """Numbers of sampling steps; none to generate nothing."""
    every: int = 1
    """Look only at checkpoints whose step is a multiple of this."""


def run(arguments: list[str]) -> None:
    runs = list(takewhile(lambda word: not word.startswith("-"), arguments))
    options = parse(
        Options, arguments[len(runs) :], prog="xdlm eval dynamics RUN [RUN ...]",
        description=_DESCRIPTION,
    )  # fmt: skip
    if not runs:
        raise UserError("which runs? for example: xdlm eval dynamics runs/cpu-tiny")
    gen.check_settings(options.steps, options.n)
    if options.every < 1:
        raise UserError(f"--every must be at least 1, got {options.every}")
    folders = [(str(Path(run)), folder) for run in runs for folder in _checkpoints(run, options)]
    check_target(options.records)
    dynamics = _Dynamics(options)
    table = Table("run", "step", *dynamics.columns)
    rule = ""
    for run, folder in folders:
        model = load(folder, device=options.device, weights=options.weights)
        values = dynamics.measured(run, model)
        table.add_row(run, f"{model.step:,}", *(with_error(r.value, r.stderr) for r in values))
        rule = packing_rule(model, options.length)
    show_table(table, f"{options.weights} weights; {rule}; {dynamics.story()}")


def _checkpoints(run: str, options: Options) -> list[Path]:
    found = run_checkpoints(Path(run))
    if not found:
        raise UserError(f"{run} holds no checkpoints; give folders that `xdlm train` wrote to")
    chosen = [folder for folder in found if step_of(folder) % options.every == 0]
    if not chosen:
        raise UserError(f"{run} holds no checkpoint at a multiple of {options.every} steps")
    return chosen


class _Dynamics:
    """Measures checkpoints one after another; texts are read and judges opened once."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._held = {measurement(r): r for r in resume_records(Path(options.records))}
        self._rows: dict[tuple[str, ...], Rows] = {}
        self._judges: dict[str, Judge] = {}
        self._taken = self._made = 0

    @property
    def columns(self) -> list[str]:
        means = [f"mean of {len(ZERO_SHOT)}"] * self._options.zero_shot
        generated = [
            f"{name}, {n} steps" for n in self._options.steps for name in ("judge", "entropy")
        ]
        return [*self._sources(), *means, *generated]

    def story(self) -> str:
        judges = " and ".join(dict.fromkeys(judge.name for judge in self._judges.values()))
        return (
            f"judge: {judges or 'none'}; {self._made} results measured, {self._taken} taken from "
            f"{self._options.records}"
        )

    def measured(self, run: str, model: Model) -> list[EvalRecord]:
        """The results that a line of the table shows."""
        return [*self._texts(run, model), *self._generated(run, model)]

    def _sources(self) -> list[str]:
        return [*self._options.data, *(ZERO_SHOT if self._options.zero_shot else ())]

    def _texts(self, run: str, model: Model) -> list[EvalRecord]:
        options, found = self._options, []
        for source in self._sources():
            rows = self._read(model, source)
            plan = ppl.planned(model, run, source, rows, options.seed, options)
            found += self._once([plan], partial(_text_measured, model, plan, rows, options))
        if options.zero_shot:
            mean = ppl.mean_of(found[-len(ZERO_SHOT) :])
            found += self._once([mean], lambda: [mean])
        return found

    def _generated(self, run: str, model: Model) -> list[EvalRecord]:
        options, shown = self._options, []
        if not options.steps:
            return []
        judge = self._judge(run, model)
        for steps in options.steps:
            plan = gen.planned(model, run, judge, steps, options, options.seed, options.length)
            found = self._once(gen.expected(plan), partial(_texts_judged, model, plan, judge))
            shown += found[:2]
        return shown

    def _once(
        self, plans: Sequence[EvalRecord], measure: Callable[[], list[EvalRecord]]
    ) -> list[EvalRecord]:
        """What the file holds of the planned results, or else what a measurement gives."""
        held = [self._held[key] for plan in plans if (key := measurement(plan)) in self._held]
        if len(held) == len(plans):
            self._taken += len(held)
            return held
        records = measure()
        new = [record for record in records if measurement(record) not in self._held]
        keep(self._options.records, *new)
        self._held |= {measurement(record): record for record in new}
        self._made += len(new)
        return records

    def _read(self, model: Model, source: str) -> Rows:
        key = (source, model.tokenizer.digest, packing_rule(model, self._options.length))
        if key not in self._rows:
            self._rows[key] = read_rows(model, source, self._options.length)
        return self._rows[key]

    def _judge(self, run: str, model: Model) -> Judge:
        """The judge, and on its first use what it says of real text."""
        options, tokenizer = self._options, model.tokenizer
        if tokenizer.digest not in self._judges:
            device = model.denoiser.head_weight.device
            judge = open_judge(options.judge, tokenizer, device)
            self._judges[tokenizer.digest] = judge
            if options.data:
                source = options.data[0]
                real = gen.RealText(
                    model,
                    source,
                    self._read(model, source),
                    options.n,
                    options.length,
                    options.seed,
                )
                self._once(
                    real.expected(run, judge),
                    lambda: [r for found in real.judged(run, judge).values() for r in found],
                )
        return self._judges[tokenizer.digest]


def _text_measured(
    model: Model, plan: EvalRecord, rows: Rows, reading: Reading
) -> list[EvalRecord]:
    return [ppl.measured(model, plan, rows, reading)]


def _texts_judged(model: Model, plan: EvalRecord, judge: Judge) -> list[EvalRecord]:
    return gen.written(model, plan, judge)[1]
