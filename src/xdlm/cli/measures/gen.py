"""`xdlm eval gen`: how well a model writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from xdlm.api import Model, check_writes, load
from xdlm.cli.measures.common import (
    Running,
    Writing,
    check_settings,
    check_target,
    keep,
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
from xdlm.evaluation.writing import measure_writing, plan_writing
from xdlm.files import check_writable, write_atomic

_DESCRIPTION = """Quality of generated text for several numbers of sampling steps: perplexity under a judge
(over all of the judge's tokens), entropy of each text's own token frequencies, the share of n-grams that do
not repeat, and MAUVE on request. Real text and the same text with its tokens shuffled stand beside it.

A judge is `ngram` (trigrams of the embedded novels, no download), a folder with any causal language model
of the transformers library, or a .gguf file. Figures under different judges do not compare.

examples:
  xdlm eval gen --steps 4 16 64
  xdlm eval gen --model runs/owt --judge models/gpt2-large --n 256 --records results.jsonl --samples texts/
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
    mauve: bool = False
    """Compare generated with real text by MAUVE too: needs a causal language model as judge, xdlm[eval],
    and many texts."""
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
    model = load(options.model, device=options.device, weights=options.weights)
    check_writes(model.config)
    judge = open_judge(options.judge, model.tokenizer, model.denoiser.head_weight.device)
    source = own_text(model.config) if options.data is None else options.data
    rows = read_rows(model, source, options.length)
    real = RealText(model, source, rows, n=options.n, seed=options.seed)
    mauve = _mauve(judge, real, options) if options.mauve else None
    columns = ["judge's perplexity", "entropy", "distinct-1/2/3"] + ["MAUVE"] * options.mauve
    table = Table("texts", *columns, "forward passes")
    for kind, records in judged_aloud(real, options.model, judge, mauve).items():
        keep(options.records, *records)
        _add_row(table, kind.replace("_", ", "), records)
    for steps in options.steps:
        plan = planned(model, options.model, judge, steps, options, options)
        out, records = measure_writing(model, plan, judge, progress=progress)
        if mauve is not None:
            records.append(mauve.record(records[0], out.text, progress=progress))
        _add_row(table, f"{steps} steps", records)
        if options.samples is not None:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in out.text)
            write_atomic(Path(options.samples) / f"steps-{steps:05d}.jsonl", lines)
        keep(options.records, *records)
    show_table(table, f"{options.model}, {options.n} texts each, judge: {judge.name}")


def planned(
    model: Model, name: str, judge: Judge, steps: int, running: Running, writing: Writing
) -> EvalRecord:
    return plan_writing(
        model, name, judge, n=writing.n, steps=steps, length=running.length, seed=running.seed,
        temperature=writing.temperature, top_p=writing.top_p,
    )  # fmt: skip


def judged_aloud(
    real: RealText, name: str, judge: Judge, mauve: Mauve | None = None
) -> dict[str, list[EvalRecord]]:
    """A judge that does not tell real text from shuffled is worth a word."""
    records = real.judged(name, judge, mauve=mauve, progress=progress)
    if not is_judge_of_text(records):
        console().print(
            f"{judge.name} does not rank real text above the same text shuffled: what it says of "
            "other texts means nothing", markup=False,
        )  # fmt: skip
    return records


def _mauve(judge: Judge, real: RealText, options: Options) -> Mauve:
    able = check_mauve(judge, min(options.n, len(real.texts)))
    return Mauve(
        able, real.texts, source=real.source, digest=real.digest, seed=options.seed,
        progress=progress,
    )  # fmt: skip


def _add_row(table: Table, name: str, records: Sequence[EvalRecord]) -> None:
    ppl, entropy, *shares = records[:5]
    more = [with_error(r.value, r.stderr, 3) for r in records[5:]]
    if len(table.columns) == 6 and not more:
        more = [""]
    table.add_row(
        name, with_error(ppl.value, ppl.stderr), with_error(entropy.value, entropy.stderr, 3),
        " / ".join("" if r.value is None else f"{r.value:.2f}" for r in shares), *more,
        "" if ppl.nfe is None else f"{ppl.nfe:.0f}",
    )  # fmt: skip
