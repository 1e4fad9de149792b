"""`xdlm eval draws`: how faithfully a sampler draws."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table

from xdlm import __version__
from xdlm.api import MAX_SAMPLES
from xdlm.cli.measures.common import check_target, keep, show_table, with_error
from xdlm.cli.measures.laws import LawOptions, check_law, open_law
from xdlm.cli.options import parse
from xdlm.cli.progress import progress, waiting
from xdlm.config import ProcessConfig
from xdlm.errors import UserError, check_seed
from xdlm.evaluation.generation import Mean
from xdlm.evaluation.known_law import (
    BOUND,
    CALCULATED,
    ENTROPY,
    EXCESS,
    PERPLEXITY,
    ZIPF,
    Faithfulness,
    IndependentLaw,
    Law,
    draw_texts,
)
from xdlm.evaluation.markov_law import MarkovLaw, bound_of
from xdlm.evaluation.provenance import commit
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.starvation import classes_of, starved_nats
from xdlm.noise import NoiseProcess
from xdlm.sampling import GUMBEL, THINNED, SamplerConfig
from xdlm.training.device import describe, pick_device

_DESCRIPTION = """Texts whose law is known, drawn by a sampler that is given ideal predictions. No network
is trained, and nobody judges.

Each position has a law of its own, independent of all others: Zipf's, or what a language model says of the
next token of a real text. In any number of steps and under every noise the perplexity of such texts under
the law should be the law's own; where it is not, that is the sampler's doing, and will be part of all that
is measured of its texts.

Or tokens depend on each other (--law markov): a hidden Markov model learns a text, and what is ideal to
predict in noisy texts of its law is calculated. What few steps cost is then the noise's doing, and only
what is off in many steps the sampler's.

examples:
  xdlm eval draws --steps 8 64 --length 128 --tokens 5000
  xdlm eval draws --process.kind masked --impl gumbel --steps 8 128 1024 --n 2 --records draws.jsonl
  xdlm eval draws --law models/gpt2-large --data wikitext2:test --impl gumbel --steps 8 1024
  xdlm eval draws --process.kind uniform --impl gumbel --calculate --steps 8 1024
  xdlm eval draws --law markov --length 64 --n 64 --steps 4 16 64 --bound 64 --keep-law novels.safetensors
  xdlm eval draws --law novels.safetensors --process.kind masked --length 64 --n 64 --steps 4 16 64
"""


@dataclass(frozen=True)
class Options(LawOptions):
    process: ProcessConfig = field(default_factory=ProcessConfig)
    """The noise that is undone."""
    steps: tuple[int, ...] = (8, 32, 128)
    """Numbers of sampling steps; the final denoise comes on top."""
    n: int = 1
    """Texts per number of steps."""
    impl: str = THINNED
    """How tokens are drawn: thinned is fast, dense its slow twin of the same law; gumbel draws as published
    implementations do, by float32 noise that starves rare tokens; starved has nearly the law of that
    noise, and is several times as fast."""
    calculate: bool = False
    """Do not draw, but calculate what float32 noise (--impl gumbel) makes of the law: without chance, and
    exactly where little of a position's weight moves in a step."""
    bound: int = 0
    """markov: on so many texts of the law, how tight the bound on their likelihood is, given ideal
    predictions."""
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
    law = open_law(options, device)
    process = options.process.build(options.process.vocab(law.n_tokens))
    assert process is not None, "it has noise"
    table, remarks = Table("steps", "perplexity under the law", "entropy of a text"), []
    for steps, found in _measured(options, law, process, device):
        keep(options.records, *_records(options, law, steps, found, device))
        entropy = "" if found.entropy is None else with_error(*_pair(found.entropy), 3)
        table.add_row(f"{steps}", with_error(*_pair(found.perplexity)), entropy)
        remarks = [_own(found)]
    if options.bound:
        remarks.append(_bound(options, law, process, device))
    how = f"{options.n} x {options.length:,} tokens, drawn by {options.impl}"
    show_table(
        table,
        f"{law.name}, {'calculated for float32 noise' if options.calculate else how}",
        *remarks,
    )


def _own(found: Faithfulness) -> str:
    entropy = "" if found.own_entropy is None else (
        f", the entropy of its texts {with_error(*_pair(found.own_entropy), 3)}"
    )  # fmt: skip
    return f"The law's own perplexity is {with_error(*_pair(found.expected))}{entropy}."


def _bound(options: Options, law: Law, process: NoiseProcess, device: torch.device) -> str:
    """Of texts of the law itself, beside what the law says of the same ones."""
    assert isinstance(law, MarkovLaw)
    texts = law.texts(options.bound, options.length, options.seed)
    with progress("bounding the likelihood") as show:
        found = bound_of(law, process, texts, seed=options.seed, device=device, on_batch=show)
    about = _about(options, law, options.bound, device)
    known = {
        PERPLEXITY: found.own, EXCESS: found.excess.value, f"{EXCESS}_stderr": found.excess.stderr,
        "tokens": found.likelihood.n_tokens,
    }  # fmt: skip
    record = dataclasses.replace(
        about, metric=BOUND, value=found.perplexity.value, stderr=found.perplexity.stderr,
        draws=found.likelihood.draws, row_nats=[round(nats, 2) for nats in found.likelihood.row_nats],
        details={**known, **about.details},
    )  # fmt: skip
    keep(options.records, record)
    return (
        f"The bound of ideal predictions on {options.bound:,} texts of the law is "
        f"{with_error(*_pair(found.perplexity))}, {with_error(*_pair(found.excess), 4)} nats a token "
        f"above what the law itself says of them, {found.own:,.2f}."
    )


def _measured(
    options: Options, law: Law, process: NoiseProcess, device: torch.device
) -> Iterator[tuple[int, Faithfulness]]:
    if not options.calculate:
        return _drawn(options, law, process, device)
    assert isinstance(law, IndependentLaw)
    return _calculated(options, law, process)


def _drawn(
    options: Options, law: Law, process: NoiseProcess, device: torch.device
) -> Iterator[tuple[int, Faithfulness]]:
    for steps in options.steps:
        config = SamplerConfig(steps, impl=options.impl)
        with progress(f"drawing in {steps} steps") as show:
            drawn = draw_texts(
                law, process, config, n=options.n, length=options.length, seed=options.seed,
                device=device, on_step=show,
            )  # fmt: skip
        with waiting(f"judging texts of {steps} steps by the law"):
            found = law.faithfulness(drawn)
        yield steps, found


def _calculated(
    options: Options, law: IndependentLaw, process: NoiseProcess
) -> Iterator[tuple[int, Faithfulness]]:
    classes = classes_of(law)
    own = math.exp(classes.mean((classes.size * classes.p * classes.nats).sum(-1)))
    for steps in options.steps:
        with progress(f"calculating {steps} steps") as show:
            nats = starved_nats(classes, process, steps, on_step=show)
        yield steps, Faithfulness(Mean(math.exp(nats), 0.0), Mean(own, 0.0), None)


def _pair(mean: Mean) -> tuple[float, float | None]:
    """What is calculated has no error."""
    return mean.value, mean.stderr or None


def _check(options: Options) -> None:
    check_seed(options.seed, name="--seed")
    if options.process.is_autoregressive:
        raise UserError(
            "--process.kind must be masked, uniform, mixed or gidd: others have no noise to undo"
        )
    if options.process.mask_id is not None:
        raise UserError(
            "the mask of a known law is always the last token: leave out --process.mask-id"
        )
    if not options.steps:
        raise UserError("--steps needs at least one number")
    for steps in options.steps:
        SamplerConfig(steps, impl=options.impl)
    if options.calculate and options.impl != GUMBEL:
        raise UserError(
            "--calculate is for float32 noise, other draws keep to the law: add --impl gumbel"
        )
    check_law(options)
    if options.has_memory and options.calculate:
        raise UserError("--calculate is for laws of independent tokens: leave it out, and draw")
    if options.bound and not options.has_memory:
        raise UserError("--bound is for --law markov: the others' tokens are independent")
    if options.bound and not 2 <= options.bound <= MAX_SAMPLES:
        raise UserError(f"--bound must be 0 or lie in 2..{MAX_SAMPLES:,}, got {options.bound}")
    if not 1 <= options.n <= MAX_SAMPLES:
        raise UserError(f"--n must lie in 1..{MAX_SAMPLES:,}, got {options.n}")


def _records(
    options: Options, law: Law, steps: int, found: Faithfulness, device: torch.device
) -> list[EvalRecord]:
    n, sampler = (0, CALCULATED) if options.calculate else (options.n, options.impl)
    about = dataclasses.replace(
        _about(options, law, n, device), steps=steps, sampler=sampler, temperature=1.0, top_p=1.0
    )
    known = {PERPLEXITY: found.expected.value}
    if found.own_entropy is not None:
        known |= {f"{PERPLEXITY}_stderr": found.expected.stderr, ENTROPY: found.own_entropy.value}
    return [
        dataclasses.replace(
            about, metric=metric, value=mean.value, stderr=mean.stderr, details={**known, **about.details}
        )
        for metric, mean in ((PERPLEXITY, found.perplexity), (ENTROPY, found.entropy))
        if mean is not None
    ]  # fmt: skip


def _about(options: Options, law: Law, n: int, device: torch.device) -> EvalRecord:
    """What is the same of everything that is measured."""
    config: dict[str, Any] = {"process": dataclasses.asdict(options.process)}
    data = None if options.law == ZIPF else options.text
    if isinstance(law, MarkovLaw):
        config, data = {**config, "law": law.origin}, law.origin.get("data")
    return EvalRecord(
        PERPLEXITY, None, None, n, options.seed, law.name, 0, "exact", "float32", config, law.digest,
        __version__, commit(), torch.__version__, describe(device), length=options.length, data=data,
        details={"vocabulary": law.n_tokens},
    )  # fmt: skip
