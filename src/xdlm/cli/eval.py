"""`xdlm eval ppl` and `xdlm eval gen`: how well a model predicts text, and how well it writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from xdlm.api import Model, load
from xdlm.cli.options import parse
from xdlm.cli.progress import progress
from xdlm.cli.record import provenance
from xdlm.data import ZERO_SHOT, Rows, load_rows
from xdlm.errors import UserError, did_you_mean
from xdlm.evaluation.generation import Quality, quality
from xdlm.evaluation.judges import NGRAM, Judge, open_judge
from xdlm.evaluation.records import EvalRecord, append_records
from xdlm.files import check_writable, write_atomic

_PPL = """Perplexity: an upper bound by Monte Carlo, with its standard error.

All terms of the bound are counted, the first step from pure noise and the final denoise included;
every token counts once, the end of the text (less than a row) too. Documents are joined by the end token,
as in training.

examples:
  xdlm eval ppl
  xdlm eval ppl --model runs/mine --data my-texts/ --draws 16 --records results.jsonl
  xdlm eval ppl --model runs/owt --data prepared/owt-val --zero-shot --records results.jsonl
"""
_GEN = """Quality of generated text for several numbers of sampling steps: perplexity under a judge (over
all of the judge's tokens), entropy of each text's own token frequencies, and the share of n-grams that do
not repeat. Real text and the same text with its tokens shuffled stand beside it.

A judge is `ngram` (trigrams of the embedded novels, no download), a folder with any causal language model
of the transformers library, or a .gguf file. Figures under different judges do not compare.

examples:
  xdlm eval gen --steps 4 16 64
  xdlm eval gen --model runs/owt --judge models/gpt2-large --n 256 --records results.jsonl --samples texts/
"""


@dataclass(frozen=True)
class PplOptions:
    model: str = "pocket"
    """A bundled name, a checkpoint folder or a run folder."""
    data: tuple[str, ...] = ()
    """Texts, by default corpus:heldout: a corpus of the papers (ptb:test), a file, or a folder of files
    or of shards that `xdlm prepare` made."""
    zero_shot: bool = False
    """Measure the papers' seven zero-shot sets too."""
    draws: int = 4
    """Times at which the bound's integrand is looked at, per row."""
    max_rows: int | None = None
    """Look at only so many rows of each text."""
    batch: int = 16
    """Rows that go through the model at a time."""
    seed: int = 0
    """Decides times and noise."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights, or those that training left."""
    device: str = "auto"
    """auto, cpu or cuda."""
    records: str | None = None
    """Append the results to this file, one line of JSON each."""


@dataclass(frozen=True)
class GenOptions:
    model: str = "pocket"
    """A bundled name, a checkpoint folder or a run folder."""
    steps: tuple[int, ...] = (8, 32, 128)
    """Numbers of sampling steps; the final denoise comes on top."""
    n: int = 32
    """Texts per number of steps."""
    length: int | None = None
    """Tokens per text; by default a row's."""
    judge: str = NGRAM
    """ngram, a folder with a causal language model, or a .gguf file."""
    data: str = "corpus:heldout"
    """Real text to set beside."""
    temperature: float = 1.0
    """Below 1 sharpens predictions, above 1 flattens them."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens that holds this probability."""
    seed: int = 0
    """Decides every draw."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights, or those that training left."""
    device: str = "auto"
    """auto, cpu or cuda."""
    samples: str | None = None
    """Keep the texts in this folder, a file of JSON lines per number of steps."""
    records: str | None = None
    """Append the results to this file, one line of JSON each."""


def run(arguments: list[str]) -> None:
    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            print("usage: xdlm eval ppl|gen [options]\n")
            parse(PplOptions, ["--help"], prog="xdlm eval ppl", description=_PPL)
        raise UserError(f"which measure? one of {', '.join(MEASURES)}; for example: xdlm eval ppl")
    if arguments[0] not in MEASURES:
        word = arguments[0]
        raise UserError(f"unknown measure '{word}'{did_you_mean(word, MEASURES)}")
    MEASURES[arguments[0]](arguments[1:])


def ppl(arguments: list[str]) -> None:
    options = parse(PplOptions, arguments, prog="xdlm eval ppl", description=_PPL)
    sources = [*options.data, *(ZERO_SHOT if options.zero_shot else ())] or ["corpus:heldout"]
    _check_target(options.records)
    model = load(options.model, device=options.device, weights=options.weights)
    texts = [
        (source, _rows(model, source)) for source in sources
    ]  # all of them, before hours of work
    table = Table("text", "perplexity", "nats/token", "bits/char", "tokens", "rows")
    for source, rows in texts:
        with progress(f"evaluating {source}") as show:
            result = model.perplexity_of(
                rows, draws=options.draws, seed=options.seed, batch=options.batch,
                max_rows=options.max_rows, on_batch=show,
            )  # fmt: skip
        bits = result.bits_per_character
        table.add_row(
            source, f"{result.value:.3f} ± {result.stderr:.3f}",
            f"{result.nats_per_token:.4f} ± {result.nats_stderr:.4f}",
            "" if bits is None else f"{bits:.4f}", f"{result.n_tokens:,}", f"{result.n_rows:,}",
        )  # fmt: skip
        details = {"nats_per_token": result.nats_per_token, "nats_stderr": result.nats_stderr}
        _keep(
            options.records,
            EvalRecord(
                "ppl", result.value, result.stderr, result.n_rows, options.seed, options.model,
                data=source, data_sha256=rows.digest, length=rows.length, draws=result.draws,
                details=details | ({} if bits is None else {"bits_per_character": bits}),
                **provenance(model),
            )
        )  # fmt: skip
    _show(
        table,
        f"{options.model}, step {model.step:,}, {model.weights} weights, {options.draws} draws a row",
    )


def gen(arguments: list[str]) -> None:
    options = parse(GenOptions, arguments, prog="xdlm eval gen", description=_GEN)
    if not options.steps or min(options.steps) < 1 or options.n < 1:
        raise UserError("--steps and --n need numbers of at least 1")
    _check_target(options.records)
    if options.samples is not None:
        check_writable(Path(options.samples))
    model = load(options.model, device=options.device, weights=options.weights)
    judge = open_judge(options.judge, model.tokenizer, model.denoiser.head_weight.device)
    table = Table("texts", "judge's perplexity", "entropy", "distinct-1/2/3", "forward passes")
    for name, tokens in _real_texts(model, options):
        with progress(f"judging {name}") as show:
            texts = [model.tokenizer.decode(ids) for ids in tokens]
            _add_row(table, name, quality(texts, tokens, judge, show), "")
    for steps in options.steps:
        with progress(f"sampling in {steps} steps") as show:
            out = model.sample(
                options.n, steps=steps, length=options.length, seed=options.seed,
                temperature=options.temperature, top_p=options.top_p, trajectory=False,
                on_step=show,
            )  # fmt: skip
        ids = [np.asarray(row) for row in out.tokens.cpu().numpy()]
        with progress("judging") as show:
            found = quality(out.text, ids, judge, show)
        _add_row(table, f"{steps} steps", found, str(out.nfe))
        if options.samples is not None:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in out.text)
            write_atomic(Path(options.samples) / f"steps-{steps:05d}.jsonl", lines)
        _keep(options.records, *_gen_records(model, options, judge, steps, out.nfe, found))
    _show(table, f"{options.model}, {options.n} texts each, judge: {judge.name}")


def _rows(model: Model, source: str) -> Rows:
    data = model.config.data
    with progress(f"reading {source}") as show:
        return load_rows(
            source, model.tokenizer, data.length, bos=data.bos, eos=data.eos, frame=data.frame,
            on_progress=show,
        )  # fmt: skip


def _real_texts(model: Model, options: GenOptions) -> list[tuple[str, list[Any]]]:
    """Rows of real text, and the same with their tokens in random order."""
    rows = _rows(model, options.data)
    if len(rows) == 0:
        raise UserError(f"{options.data} is shorter than one row of {rows.length} tokens")
    spread = np.linspace(0, len(rows) - 1, min(options.n, len(rows))).astype(np.int64)
    length = options.length or rows.length
    real = [ids[:length] for ids in rows.take(spread)]
    generator = np.random.default_rng(options.seed)
    return [("real", real), ("real, shuffled", [generator.permutation(ids) for ids in real])]


def _add_row(table: Table, name: str, found: Quality, passes: str) -> None:
    table.add_row(
        name, f"{found.perplexity.value:.2f} ± {found.perplexity.stderr:.2f}",
        f"{found.entropy.value:.3f} ± {found.entropy.stderr:.3f}",
        " / ".join(f"{share:.2f}" for share in found.distinct.values()), passes,
    )  # fmt: skip


def _gen_records(
    model: Model, options: GenOptions, judge: Judge, steps: int, nfe: int, found: Quality
) -> list[EvalRecord]:
    about = EvalRecord(
        "gen_ppl", found.perplexity.value, found.perplexity.stderr, found.n, options.seed,
        options.model, steps=steps, nfe=nfe, sampler="thinned", temperature=options.temperature,
        top_p=options.top_p, length=options.length or model.length, judge=judge.name,
        judge_sha256=judge.sha256, details={"judge_tokens": found.judge_tokens},
        **provenance(model),
    )  # fmt: skip
    alone = dataclasses.replace(about, judge=None, judge_sha256=None, details={})
    entropy = found.entropy
    return [
        about,
        dataclasses.replace(alone, metric="entropy", value=entropy.value, stderr=entropy.stderr),
        *(
            dataclasses.replace(alone, metric=f"distinct_{n}", value=share, stderr=None)
            for n, share in found.distinct.items()
        ),
    ]


def _keep(file: str | None, *records: EvalRecord) -> None:
    """At once, so that a crash later on costs nothing that was measured."""
    if file is not None:
        append_records(Path(file), records)


def _check_target(file: str | None) -> None:
    if file is not None:
        if Path(file).is_dir():
            raise UserError(f"cannot write {file}: it is a folder")
        check_writable(Path(file).absolute().parent)


def _show(table: Table, title: str) -> None:
    screen = Console()
    if not screen.is_terminal:
        screen.width = max(screen.width, 140)  # a file has room
    screen.print(title, markup=False, highlight=False)
    screen.print(table)


#: What can be measured. A new measure is a function and a line here.
MEASURES: dict[str, Callable[[list[str]], None]] = {"ppl": ppl, "gen": gen}
