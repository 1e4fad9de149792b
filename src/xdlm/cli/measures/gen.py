"""`xdlm eval gen`: how well a model writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from xdlm.api import Model, check_writes
from xdlm.cli.measures.common import (
    Running,
    Writing,
    check_settings,
    check_target,
    keep,
    opened,
    own_text,
    read_rows,
    show_table,
    with_error,
)
from xdlm.cli.options import parse
from xdlm.cli.progress import console, progress
from xdlm.errors import UserError
from xdlm.evaluation.frontier import Mauve, check_mauve
from xdlm.evaluation.judges import Judge, open_judge
from xdlm.evaluation.real import RealText, is_judge_of_text
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.transitions import transitions
from xdlm.evaluation.writing import judge_texts, plan_writing, write_texts
from xdlm.files import check_writable, write_atomic

_DESCRIPTION = """Quality of generated text for several numbers of sampling steps: perplexity under a judge
(over all of the judge's tokens), entropy of each text's own token frequencies, the share of n-grams that do
not repeat, and MAUVE on request. Real text and the same text with its tokens shuffled stand beside it.

A judge is `ngram` (trigrams of the embedded novels, no download), an autoregressive model that was trained
here, a folder with any causal language model of the transformers library, or a .gguf file. Figures under
different judges do not compare; several may judge the same texts, each for itself.

examples:
  xdlm eval gen --steps 4 16 64
  xdlm eval gen --model runs/owt --judge models/gpt2-large --n 256 --records results.jsonl --samples texts/
  xdlm eval gen --model runs/owt --judge models/gpt2-large --steps 8 128 1024 --n 1024 256 64
  xdlm eval gen --model runs/repro/mdlm --judge runs/repro/judge models/gpt2-large
  xdlm eval gen --model runs/owt --judge models/gpt2-large --n 1000 --mauve --data openwebtext:validation
"""


@dataclass(frozen=True)
class Options(Running, Writing):
    model: str = "pocket"
    """A bundled name, a checkpoint folder or a run folder."""
    steps: tuple[int, ...] = (8, 32, 128)
    """Numbers of sampling steps; the final denoise comes on top."""
    data: str | None = None
    """Real text to set beside; by default what validated the model's training, or else corpus:heldout."""
    k: float | None = None
    """Sample as if the model had been trained with mixed noise of this ratio k."""
    mauve: bool = False
    """Compare generated with real text by MAUVE too: needs a causal language model as the first judge,
    xdlm[eval], and many texts."""
    samples: str | None = None
    """Keep the texts in this folder, a file of JSON lines per number of steps."""
    records: str | None = None
    """Append the results to this file, one line of JSON each."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm eval gen", description=_DESCRIPTION)
    if not options.steps:
        raise UserError("--steps needs at least one number")
    check_settings(options)
    check_target(options.records)
    if options.samples is not None:
        check_writable(Path(options.samples), make=False)
    model = opened(options.model, options)
    check_writes(model.config)
    model = model if options.k is None else model.mixed(options.k)
    device = model.denoiser.device
    judges = [open_judge(name, model.tokenizer, device) for name in options.judge]
    source = own_text(model.config) if options.data is None else options.data
    rows = read_rows(model, source, options.length)
    real = RealText(model, source, rows, n=max(options.n), seed=options.seed)
    mauve = _mauve(judges[0], real, options) if options.mauve else None
    table = _table(judges, with_mauve=options.mauve)
    beside = [
        judged_aloud(real, options.model, judge, mauve if judge is judges[0] else None)
        for judge in judges
    ]
    for kind in beside[0]:
        records = _joined([found[kind] for found in beside])
        keep(options.records, *records)
        _add_row(table, kind.replace("_", ", "), records)
    for steps in options.steps:
        plans = [planned(model, options.model, judge, steps, options, options) for judge in judges]
        out = write_texts(
            model, plans[0], batch_tokens=options.batch_tokens, trajectory=options.transitions,
            progress=progress,
        )  # fmt: skip
        found = [
            judge_texts(out, plan, judge, progress=progress)
            for plan, judge in zip(plans, judges, strict=True)
        ]
        if mauve is not None:
            found[0].append(mauve.record(found[0][0], out.text, progress=progress))
        records = _joined(found)
        _add_row(table, f"{steps} steps", records)
        if options.samples is not None:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in out.text)
            write_atomic(Path(options.samples) / f"steps-{steps:05d}.jsonl", lines)
        keep(options.records, *records)
        if out.trajectory is not None:
            keep(options.records, transitions(plans[0], out.trajectory))
    names = " and ".join(judge.name for judge in judges)
    numbers = " / ".join(f"{n:,}" for n in options.n)
    show_table(table, f"{options.model}, {numbers} texts each, judge: {names}")


def planned(
    model: Model, name: str, judge: Judge, steps: int, running: Running, writing: Writing
) -> EvalRecord:
    seed = running.seed if writing.text_seed is None else writing.text_seed
    return plan_writing(
        model, name, judge, n=writing.texts(steps), steps=steps, length=running.length, seed=seed,
        temperature=writing.temperature, top_p=writing.top_p, impl=writing.impl,
    )  # fmt: skip


def judged_aloud(
    real: RealText, name: str, judge: Judge, mauve: Mauve | None = None
) -> dict[str, list[EvalRecord]]:
    """A judge that does not tell real text from shuffled is worth a word."""
    records = real.judged(name, judge, mauve=mauve, progress=progress)
    if not is_judge_of_text(records):
        console().print(
            f"{judge.name} does not rank real text above the same text shuffled: what it says of "
            "other texts means nothing",
        )  # fmt: skip
    return records


def _mauve(judge: Judge, real: RealText, options: Options) -> Mauve:
    if len(options.n) != 1:
        raise UserError("--mauve depends on how many texts there are; give one --n for all steps")
    able = check_mauve(judge, min(options.n[0], len(real.texts)))
    return Mauve(
        able, real.texts, source=real.source, digest=real.digest, seed=options.seed,
        progress=progress,
    )  # fmt: skip


def _joined(found: Sequence[Sequence[EvalRecord]]) -> list[EvalRecord]:
    """What several judges found of the same texts; what needs no judge once."""
    first, *others = found
    return [*first, *(r for records in others for r in records if r.judge is not None)]


def _table(judges: Sequence[Judge], *, with_mauve: bool) -> Table:
    several = [f"perplexity, {judge.name}" for judge in judges]
    perplexities = ["judge's perplexity"] if len(judges) == 1 else several
    columns = [*perplexities, "entropy", "distinct-1/2/3", *["MAUVE"] * with_mauve]
    return Table("texts", *columns, "forward passes")


def _add_row(table: Table, name: str, records: Sequence[EvalRecord]) -> None:
    ppls = [r for r in records if r.metric.endswith("ppl")]
    (entropy,) = (r for r in records if r.metric.endswith("entropy"))
    shares = [r for r in records if "distinct" in r.metric]
    mauves = [with_error(r.value, r.stderr, 3) for r in records if r.metric.endswith("mauve")]
    if len(table.columns) == len(ppls) + 5 and not mauves:
        mauves = [""]
    table.add_row(
        name, *(with_error(r.value, r.stderr) for r in ppls),
        with_error(entropy.value, entropy.stderr, 3),
        " / ".join("" if r.value is None else f"{r.value:.2f}" for r in shares), *mauves,
        "" if ppls[0].nfe is None else f"{ppls[0].nfe:.0f}",
    )  # fmt: skip
