"""`xdlm eval llm`: how well a model answers questions and writes programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

from rich.table import Table

from xdlm.api import check_writes
from xdlm.cli.measures.common import (
    Running,
    check_settings,
    check_target,
    is_known,
    opened,
    show_table,
)
from xdlm.cli.measures.held import Held
from xdlm.cli.options import parse
from xdlm.cli.progress import progress, waiting
from xdlm.errors import UserError
from xdlm.evaluation.harness import Responder, WriterSettings
from xdlm.evaluation.harness.running import CODE, Asking, Questions, ask, planned, questions
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.sandbox import available_guards
from xdlm.files import check_writable, write_atomic
from xdlm.sampling.writing import BATCH_TOKENS

_DESCRIPTION = """Benchmarks of large models: gsm8k, math, math500, bbh, humaneval and mbpp, asked through
lm-eval from files in the folder benchmarks of local data (XDLM_DATA), without network. The paper's settings
are --steps 32 64 128 256 and --length 256.

The answers to humaneval and mbpp are programs, which are run where --run-code allows it: in a process of
their own with limits of time, memory and output, no network and nothing to write to but a scratch folder,
as far as this machine can guarantee that; which guards stood around them is printed.

A program has passed, is wrong (a test's assertion is false) or has failed (it does not compile, raises, or
runs out of its limits).

Results are appended to --records as they come; called again, it goes on where it stopped. Only where
--samples asks for the answers themselves is everything asked again.

examples:
  xdlm eval llm --tasks gsm8k --steps 8 --limit 2
  xdlm eval llm --model runs/mine --tasks gsm8k math bbh --steps 32 64 --records results.jsonl
  xdlm eval llm --model models/LLaDA-8B-Base --tasks mbpp --run-code --sampler confidence --k 0.1
  xdlm eval llm --model runs/llada-sft-xdlm --tasks gsm8k --chat --sampler confidence --block-length 32
  xdlm eval llm --model runs/mine --tasks mbpp --programs 10 --pass-at 1 10 --temperature 1 --run-code
"""
#: Settings that one sampler alone understands; those left out are its own defaults.
_OWN = ("block_length", "guidance", "confidence", "refresh")


@dataclass(frozen=True)
class Options(Running):
    model: str = "pocket"
    """A bundled name, a checkpoint folder or a run folder."""
    tasks: tuple[str, ...] = ("gsm8k",)
    """Some of gsm8k, math, math500, bbh, humaneval, mbpp."""
    steps: tuple[int, ...] = (32,)
    """Numbers of sampling steps."""
    length: int = 256
    """Tokens of an answer."""
    limit: int | None = None
    """Ask at most this many questions of each task, the first ones."""
    sampler: Literal["ancestral", "confidence"] = "ancestral"
    """ancestral draws from the model by exact reverse steps; confidence is the paper's Algorithm 1."""
    block_length: int | None = None
    """confidence: write in blocks of this many tokens, one after the other; by default all at once."""
    guidance: float | None = None
    """confidence: strength of guidance by the prompt; 1 is off (default)."""
    confidence: Literal["token", "entropy", "margin", "random"] | None = None
    """confidence: what is filled first (default token: where the token drawn is likeliest)."""
    refresh: int | None = None
    """confidence: run the model on the whole text only once in this many steps, and on the current block in
    the others: faster, but an approximation; by default on the whole text in every step."""
    temperature: float = 0.0
    """0 takes the most likely token of every prediction."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens that holds this probability."""
    k: float | None = None
    """Sample as if the model had been trained with mixed noise of this ratio k; with the confidence
    sampler, 0 rewrites nothing, as in LLaDA."""
    programs: int = 1
    """Programs per problem, in humaneval and mbpp."""
    pass_at: tuple[int, ...] = (1,)
    """The k of pass@k, at most the number of programs."""
    run_code: bool = False
    """Allow that programs which the model wrote are run, in the sandbox."""
    chat: bool = False
    """Ask through the model's chat template, each question a message with its examples in it."""
    batch_tokens: int = BATCH_TOKENS
    """Tokens of prompts and answers that go through the model at a time."""
    context: int | None = None
    """Tokens that a prompt and its answer may have together: longer prompts lose their beginning. By
    default none does."""
    samples: str | None = None
    """Keep questions and answers in this folder, a file of JSON lines per task and number of steps; all
    are asked then, whatever --records holds."""
    records: str | None = None
    """Append the results to this file, one line of JSON each, and skip what it holds already."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm eval llm", description=_DESCRIPTION)
    check_settings(options)
    if not options.steps:
        raise UserError("--steps needs at least one number")
    asking = Asking(
        options.limit, options.programs, options.pass_at, options.run_code, options.chat
    )
    asking.check(options.tasks)
    settings = [_writing(options, steps) for steps in options.steps]
    check_target(options.records)
    if options.samples is not None:
        check_writable(Path(options.samples), make=False)
    model = opened(options.model, options)
    check_writes(model.config)
    model = model if options.k is None else model.mixed(options.k)
    responders = [
        Responder(model, writing, context=options.context, progress=progress)
        for writing in settings
    ]
    asking.check_repeats(options.tasks, responders[0])  # complain before the first question
    if options.chat:
        responders[0].template()
    table = Table("task", "steps", "metric", "value", "questions", "ends", "forward passes")
    held = Held(options.records)
    prepared = cache(partial(_prepared, responders[0], asking))
    for responder in responders:
        for task in options.tasks:
            measure = partial(_asked, responder, task, asking, options)
            if options.records is None or options.samples is not None:
                records = measure()
                held.add(records)
            else:
                those = prepared(task)
                plans = planned(responder, options.model, task, those, asking)
                records = held.once(plans, measure)
            for record in records:
                _add_row(table, record)
    guards = (
        f"; programs run here under {available_guards()}" if set(CODE) & set(options.tasks) else ""
    )
    title = f"{options.model}, {options.length} tokens, {settings[0].sampler} sampler"
    story = f"; {held.story()}" if options.records is not None else ""
    show_table(table, f"{title}, temperature {options.temperature:g}{guards}{story}")


def _writing(options: Options, steps: int) -> WriterSettings:
    extra = {name: getattr(options, name) for name in _OWN if getattr(options, name) is not None}
    return WriterSettings(
        options.sampler, steps, options.length, options.temperature, options.top_p, options.seed,
        options.batch_tokens, extra,
    )  # fmt: skip


def _prepared(responder: Responder, asking: Asking, task: str) -> Questions:
    with waiting(f"preparing {task}"):
        return questions(responder, task, asking)


def _asked(responder: Responder, task: str, asking: Asking, options: Options) -> list[EvalRecord]:
    asked = ask(responder, options.model, task, asking)
    if options.samples is not None:
        lines = "".join(json.dumps(sample) + "\n" for sample in asked.samples)
        file = f"{task}-steps-{responder.writing.steps:05d}.jsonl"
        write_atomic(Path(options.samples) / file, lines)
    return asked.records


def _add_row(table: Table, record: EvalRecord) -> None:
    found = record.details
    ends = " / ".join(
        f"{found[end]:.0f} {end}" for end in ("failed", "wrong", "passed") if end in found
    )
    value = f"{100 * (record.value or 0):.2f} %"
    error = f" ± {100 * (record.stderr or 0):.2f}" if is_known(record.stderr) else ""
    table.add_row(
        record.data, f"{record.steps}", record.metric, value + error, f"{record.n:,}", ends,
        f"{record.nfe:.0f}",
    )  # fmt: skip
