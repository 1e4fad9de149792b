"""`xdlm eval draws`: how faithfully a sampler draws."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.table import Table

from xdlm import __version__
from xdlm.api import MAX_LENGTH, MAX_SAMPLES
from xdlm.cli.measures.common import check_target, keep, show_table, with_error
from xdlm.cli.options import check_seed, parse
from xdlm.cli.progress import progress, waiting
from xdlm.config import ProcessConfig
from xdlm.data import open_source
from xdlm.errors import UserError
from xdlm.evaluation.generation import Mean
from xdlm.evaluation.judges import CausalJudge
from xdlm.evaluation.known_law import (
    CALCULATED,
    ENTROPY,
    PERPLEXITY,
    ZIPF,
    Faithfulness,
    Law,
    draw_texts,
    faithfulness,
    next_tokens,
    zipf,
)
from xdlm.evaluation.provenance import commit
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.starvation import classes_of, starved_nats
from xdlm.noise import NoiseProcess
from xdlm.sampling import GUMBEL, THINNED, SamplerConfig
from xdlm.training.device import describe, pick_device

_DESCRIPTION = """Texts whose law is known, drawn by a sampler that is given just that law as predictions.
In any number of steps and under every noise their perplexity under the law should be the law's own; where
it is not, that is the sampler's doing, and will be part of all that is measured of its texts.

Each position has a law of its own, independent of all others: Zipf's, or what a language model says of the
next token of a real text.

examples:
  xdlm eval draws --steps 8 64 --length 128 --tokens 5000
  xdlm eval draws --process.kind masked --impl gumbel --steps 8 128 1024 --n 2 --records draws.jsonl
  xdlm eval draws --law models/gpt2-large --data wikitext2:test --impl gumbel --steps 8 1024
  xdlm eval draws --process.kind uniform --impl gumbel --calculate --steps 8 1024
"""


@dataclass(frozen=True)
class Options:
    process: ProcessConfig = field(default_factory=ProcessConfig)
    """The noise that is undone."""
    law: str = ZIPF
    """zipf, or a folder with a causal language model, or a .gguf file."""
    tokens: int = 50257
    """zipf: in the vocabulary."""
    exponent: float = 1.0
    """zipf: of a token's rank."""
    data: str = "corpus:heldout"
    """The real text that a language model reads; its beginning is enough."""
    steps: tuple[int, ...] = (8, 32, 128)
    """Numbers of sampling steps; the final denoise comes on top."""
    n: int = 1
    """Texts per number of steps."""
    length: int = 1024
    """Positions of a text."""
    impl: str = THINNED
    """How tokens are drawn: thinned is fast, dense its slow twin of the same law; gumbel draws as published
    implementations do, by float32 noise that starves rare tokens."""
    calculate: bool = False
    """Do not draw, but calculate what float32 noise (--impl gumbel) makes of the law: without chance, and
    exactly where little of a position's weight moves in a step."""
    seed: int = 0
    """Decides every draw."""
    device: str = "auto"
    """auto, cpu or cuda."""
    records: str | None = None
    """Append the results to this file, one line of JSON each."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm eval draws", description=_DESCRIPTION)
    _check(options)
    check_target(options.records)
    device = pick_device(options.device)
    law = _law(options, device)
    process = options.process.build(options.process.vocab(len(law.weight)))
    assert process is not None, "it has noise"
    table, expected = Table("steps", "perplexity under the law", "entropy of a text"), math.nan
    measured = _calculated if options.calculate else _drawn
    for steps, found in measured(options, law, process, device):
        keep(options.records, *_records(options, law, steps, found, device))
        entropy = "" if found.entropy is None else with_error(*_pair(found.entropy), 3)
        table.add_row(f"{steps}", with_error(*_pair(found.perplexity)), entropy)
        expected = found.expected
    how = f"{options.n} x {len(law.states):,} tokens, drawn by {options.impl}"
    show_table(
        table, f"{law.name}, {'calculated for float32 noise' if options.calculate else how}",
        f"The law's own perplexity is {expected:,.2f}.",
    )  # fmt: skip


def _drawn(
    options: Options, law: Law, process: NoiseProcess, device: torch.device
) -> Iterator[tuple[int, Faithfulness]]:
    for steps in options.steps:
        config = SamplerConfig(steps, impl=options.impl)
        with progress(f"drawing in {steps} steps") as show:
            drawn = draw_texts(
                law, process, config, n=options.n, seed=options.seed, device=device, on_step=show
            )
        yield steps, faithfulness(law, drawn)


def _calculated(
    options: Options, law: Law, process: NoiseProcess, device: torch.device
) -> Iterator[tuple[int, Faithfulness]]:
    classes = classes_of(law)
    own = math.exp(classes.mean((classes.size * classes.p * classes.nats).sum(-1)))
    for steps in options.steps:
        with progress(f"calculating {steps} steps") as show:
            nats = starved_nats(classes, process, steps, on_step=show)
        yield steps, Faithfulness(Mean(math.exp(nats), 0.0), own, None)


def _pair(mean: Mean) -> tuple[float, float | None]:
    """What is calculated has no error."""
    return mean.value, mean.stderr or None


def _check(options: Options) -> None:
    check_seed(options.seed)
    if options.process.is_autoregressive:
        raise UserError("there is noise to undo only for masked, uniform, mixed and gidd")
    if options.process.mask_id is not None:
        raise UserError("the mask of a known law comes behind all tokens: leave out mask_id")
    if not options.steps:
        raise UserError("--steps needs at least one number")
    for steps in options.steps:
        SamplerConfig(steps, impl=options.impl)
    if options.calculate and options.impl != GUMBEL:
        raise UserError(
            "--calculate is for float32 noise, other draws keep to the law: add --impl gumbel"
        )
    if not 1 <= options.length <= MAX_LENGTH:
        raise UserError(f"--length must lie in 1..{MAX_LENGTH:,}, got {options.length}")
    if not 1 <= options.n <= MAX_SAMPLES:
        raise UserError(f"--n must lie in 1..{MAX_SAMPLES:,}, got {options.n}")


def _law(options: Options, device: torch.device) -> Law:
    if options.law == ZIPF:
        return zipf(options.tokens, options.length, options.exponent)
    with waiting(f"reading {options.law}"):
        return next_tokens(CausalJudge(Path(options.law), device), _text(options), options.length)


def _text(options: Options) -> str:
    """The beginning of the real text: 16 characters for each token are more than enough."""
    read, enough = [], 16 * options.length
    for document in open_source(options.data).documents():
        read.append(document)
        enough -= len(document)
        if enough <= 0:
            break
    return "\n\n".join(read)


def _records(
    options: Options, law: Law, steps: int, found: Faithfulness, device: torch.device
) -> list[EvalRecord]:
    n, sampler = (0, CALCULATED) if options.calculate else (options.n, options.impl)
    about = EvalRecord(
        PERPLEXITY, None, None, n, options.seed, law.name, 0, "exact", "float32",
        {"process": dataclasses.asdict(options.process)}, law.digest, __version__, commit(),
        torch.__version__, describe(device), length=options.length, steps=steps, sampler=sampler,
        temperature=1.0, top_p=1.0,
        data=None if options.law == ZIPF else options.data,
        details={PERPLEXITY: found.expected, "vocabulary": len(law.weight)},
    )  # fmt: skip
    return [
        dataclasses.replace(about, metric=metric, value=mean.value, stderr=mean.stderr)
        for metric, mean in ((PERPLEXITY, found.perplexity), (ENTROPY, found.entropy))
        if mean is not None
    ]
