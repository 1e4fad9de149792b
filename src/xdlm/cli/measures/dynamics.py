"""`xdlm eval dynamics`: how models came to be what they are, checkpoint by checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from pathlib import Path

from rich.table import Table

from xdlm.api import Model, check_writes
from xdlm.cli.measures import gen
from xdlm.cli.measures.common import (
    Reading,
    Running,
    Writing,
    check_settings,
    check_target,
    opened,
    own_text,
    packing_rule,
    read_rows,
    show_table,
    with_error,
)
from xdlm.cli.measures.held import Held
from xdlm.cli.options import parse
from xdlm.cli.progress import progress
from xdlm.data import ZERO_SHOT, Rows
from xdlm.errors import UserError
from xdlm.evaluation.cost import training_cost
from xdlm.evaluation.judges import Judge, open_judge
from xdlm.evaluation.perplexity import mean_perplexity, measure_perplexity, plan_perplexity
from xdlm.evaluation.real import RealText
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.subject import Written
from xdlm.evaluation.transitions import planned_transitions, transitions
from xdlm.evaluation.writing import expected, judge_texts, write_texts
from xdlm.training.checkpoint import Checkpoint, open_checkpoint, run_checkpoints, step_of
from xdlm.training.trained import find_checkpoint

_DESCRIPTION = """Perplexity of text, and quality of generated text, at every checkpoint of one or several
training runs. Results are appended to --records as they come; called again, it goes on where it stopped and
looks at new checkpoints only. `xdlm report` draws them against the training step.

Training keeps the newest checkpoints alone, unless --train.keep-every says which others to keep.

examples:
  xdlm train recipes/cpu-tiny.yaml --train.keep-every 250
  xdlm eval dynamics runs/cpu-tiny --records dynamics.jsonl
  xdlm eval dynamics runs/mdlm runs/xdlm --every 100000 --steps 128 --judge models/gpt2-large runs/judge
  xdlm report --records dynamics.jsonl --out report/
"""


@dataclass(frozen=True)
class Options(Running, Reading, Writing):
    records: str = "dynamics.jsonl"
    """Append the results to this file, one line of JSON each, and skip what it holds already."""
    data: tuple[str, ...] | None = None
    """Texts whose perplexity to measure, by default what validated the runs' training, or else
    corpus:heldout; the first one is also the real text beside generated ones."""
    zero_shot: bool = False
    """Measure the papers' seven zero-shot sets too, and their mean."""
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
    check_settings(options)
    if options.every < 1:
        raise UserError(f"--every must be at least 1, got {options.every}")
    folders = [(str(Path(run)), folder) for run in runs for folder in _checkpoints(run, options)]
    if options.steps:
        for last in dict(folders).values():
            check_writes(find_checkpoint(last).config)
    data = _shared_text(folders) if options.data is None else options.data
    check_target(options.records)
    dynamics = _Dynamics(options, data)
    table = Table("run", "step", *dynamics.columns)
    rule = ""
    for run, folder in folders:
        model = opened(folder, options)
        values = dynamics.measured(run, model)
        dynamics.note_cost(run, model, open_checkpoint(folder))
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


def _shared_text(folders: Sequence[tuple[str, Path]]) -> tuple[str, ...]:
    """What validated all of the runs: figures of different texts do not compare."""
    texts = {own_text(find_checkpoint(last).config): run for run, last in dict(folders).items()}
    if len(texts) > 1:
        (one, first), (other, second), *_ = texts.items()
        raise UserError(
            f"{first} was validated on {one} and {second} on {other}; name the texts to measure all "
            "runs on with --data"
        )
    return tuple(texts)


class _Dynamics:
    """Measures checkpoints one after another; texts are read and judges opened once."""

    def __init__(self, options: Options, data: tuple[str, ...]) -> None:
        self._options, self._data = options, data
        self._held = Held(options.records)
        self._rows: dict[tuple[str, ...], Rows] = {}
        self._judges: dict[str, list[Judge]] = {}

    @property
    def columns(self) -> list[str]:
        means = [f"mean of {len(ZERO_SHOT)}"] * self._options.zero_shot
        several = [Path(name).name for name in self._options.judge]
        shown = [*(["judge"] if len(several) == 1 else several), "entropy"]
        generated = [f"{name}, {n} steps" for n in self._options.steps for name in shown]
        return [*self._sources(), *means, *generated]

    def story(self) -> str:
        opened = (judge.name for judges in self._judges.values() for judge in judges)
        judges = " and ".join(dict.fromkeys(opened))
        return f"judge: {judges or 'none'}; {self._held.story()}"

    def measured(self, run: str, model: Model) -> list[EvalRecord]:
        """The results that a line of the table shows."""
        return [*self._texts(run, model), *self._generated(run, model)]

    def note_cost(self, run: str, model: Model, checkpoint: Checkpoint) -> None:
        """What training took, where the checkpoint says."""
        cost = training_cost(model, run, checkpoint)
        if cost is not None:
            self._held.once([cost], lambda: [cost])

    def _sources(self) -> list[str]:
        return [*self._data, *(ZERO_SHOT if self._options.zero_shot else ())]

    def _texts(self, run: str, model: Model) -> list[EvalRecord]:
        options, found = self._options, []
        for source in self._sources():
            rows = self._read(model, source)
            plan = plan_perplexity(
                model, run, source, rows, draws=options.draws, seed=options.seed,
                max_rows=options.max_rows,
            )  # fmt: skip
            found += self._held.once([plan], partial(_text_measured, model, plan, rows, options))
        if options.zero_shot:
            mean = mean_perplexity(found[-len(ZERO_SHOT) :])
            found += self._held.once([mean], lambda: [mean])
        return found

    def _generated(self, run: str, model: Model) -> list[EvalRecord]:
        options, shown = self._options, []
        if not options.steps:
            return []
        judges = self._judges_for(run, model)
        for steps in options.steps:
            plans = [gen.planned(model, run, judge, steps, options, options) for judge in judges]
            # Made when the first judge asks for them, and kept for the others.
            written = cache(
                partial(
                    write_texts, model, plans[0], batch_tokens=options.batch_tokens,
                    trajectory=options.transitions, progress=progress,
                )
            )  # fmt: skip
            found = [
                self._held.once(expected(plan), partial(_texts_judged, written, plan, judge))
                for plan, judge in zip(plans, judges, strict=True)
            ]
            if options.transitions:
                plan = planned_transitions(plans[0])
                self._held.once([plan], partial(_transitions_counted, written, plan))
            shown += [*(records[0] for records in found), found[0][1]]
        return shown

    def _read(self, model: Model, source: str) -> Rows:
        key = (source, model.tokenizer.digest, packing_rule(model, self._options.length))
        if key not in self._rows:
            self._rows[key] = read_rows(model, source, self._options.length)
        return self._rows[key]

    def _judges_for(self, run: str, model: Model) -> list[Judge]:
        """The judges, and on their first use what they say of real text."""
        options, tokenizer = self._options, model.tokenizer
        if tokenizer.digest not in self._judges:
            device = model.denoiser.device
            judges = [open_judge(name, tokenizer, device) for name in options.judge]
            self._judges[tokenizer.digest] = judges
            for source in self._data[:1]:
                rows = self._read(model, source)
                real = RealText(model, source, rows, n=max(options.n), seed=options.seed)
                for judge in judges:
                    self._held.once(
                        real.expected(run, judge), partial(_real_judged, real, run, judge)
                    )
        return self._judges[tokenizer.digest]


def _transitions_counted(written: Callable[[], Written], plan: EvalRecord) -> list[EvalRecord]:
    path = written().trajectory
    assert path is not None
    return [transitions(plan, path)]


def _text_measured(
    model: Model, plan: EvalRecord, rows: Rows, reading: Reading
) -> list[EvalRecord]:
    return [
        measure_perplexity(
            model, plan, rows, batch=reading.batch, row_nats=reading.row_nats, progress=progress
        )
    ]


def _texts_judged(
    written: Callable[[], Written], plan: EvalRecord, judge: Judge
) -> list[EvalRecord]:
    return judge_texts(written(), plan, judge, progress=progress)


def _real_judged(real: RealText, run: str, judge: Judge) -> list[EvalRecord]:
    return [record for found in gen.judged_aloud(real, run, judge).values() for record in found]
