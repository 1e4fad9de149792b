"""`xdlm demo`: the whole library in about two minutes on a laptop."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from xdlm.api import Model, TextSample, load
from xdlm.cli.options import parse
from xdlm.cli.progress import console, progress
from xdlm.cli.side_by_side import compare
from xdlm.cli.train import make_trainer
from xdlm.config import DataConfig, OptimConfig, ProcessConfig, RunConfig, TrainConfig
from xdlm.data import read_documents
from xdlm.errors import UserError
from xdlm.evaluation import unigram_entropy
from xdlm.evaluation.records import append_records
from xdlm.files import check_writable, write_atomic
from xdlm.models import PRESETS
from xdlm.report import plot_overview, trajectory_page, trajectory_panel
from xdlm.report.figures import plot_generation
from xdlm.tokens import TextTokenizer
from xdlm.training.checkpoint import clear_run
from xdlm.training.runlog import read_log

_DESCRIPTION = """See what the library does: sample from the bundled model, watch a trajectory, fill in a
sentence, compare three kinds of noise, train a small model. Leaves a page and pictures in --out.

examples:
  xdlm demo
  xdlm demo --train-steps 50 --out /tmp/demo
"""
#: Few, and enough for masked noise to catch up.
_COMPARED_STEPS = (4, 8, 32)
_TEMPLATE = "The old man <mask:10> and then he <mask:10> the door."


@dataclass(frozen=True)
class Options:
    out: str = "xdlm-demo"
    """Folder for the page, the pictures and the small model."""
    seed: int = 0
    """Same seed, same demo."""
    steps: int = 32
    """Reverse steps when sampling."""
    rows: int = 96
    """Rows of held-out text to measure perplexity on."""
    texts: int = 20
    """Texts of each model and number of steps that the judge sees."""
    train_steps: int = 600
    """Steps of training for the small model."""

    def __post_init__(self) -> None:
        least = min(self.steps, self.rows, self.texts, self.train_steps)
        if least < 1 or not 0 <= self.seed < 2**31:
            raise UserError(
                "steps, rows, texts and train_steps must be at least 1, and the seed not negative"
            )


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm demo", description=_DESCRIPTION)
    screen = console(stderr=False)
    out = Path(options.out)
    check_writable(out)
    began = time.perf_counter()

    screen.rule("1  Text from the bundled model")
    model = load("pocket")
    drawn = _sample(screen, model, options)
    screen.rule("2  Filling in a sentence")
    _infill(screen, model, options)
    screen.rule("3  Three kinds of noise: the same model, text and training")
    compared = compare(
        screen, steps=_COMPARED_STEPS, n=options.texts, rows=options.rows, seed=options.seed
    )
    screen.rule("4  Training a small model from nothing")
    records, floor = _train(screen, options, out / "demo-run")

    assert drawn.trajectory is not None
    page = trajectory_page(
        drawn.trajectory, model.tokenizer, title="From noise to text",
        details={"model": "pocket (XDLM, k = 0.1)", "steps": str(options.steps),
                 "forward passes": str(drawn.nfe), "seed": str(options.seed)},
    )  # fmt: skip
    write_atomic(out / "trajectory.html", page)
    (out / "comparison.jsonl").unlink(missing_ok=True)
    append_records(out / "comparison.jsonl", compared)
    try:
        plot_overview(
            drawn.trajectory, records, out / "overview.png", reference=floor,
            reference_name="unigram entropy",
        )  # fmt: skip
        plot_generation(compared, out / "comparison.png")
        pictures = [
            f"  {out / 'comparison.png'}     who writes best in how many steps",
            f"  {out / 'overview.png'}       what changed at each step; the loss falling",
        ]
    except UserError as missing:
        pictures = [f"  (no pictures: {missing})"]
    summary = {
        "text": drawn.text, "nfe": drawn.nfe, "seconds": round(time.perf_counter() - began, 1),
        "seed": options.seed,
    }  # fmt: skip
    write_atomic(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    screen.rule(f"Done in {summary['seconds']} s")
    screen.print("Look at:")
    screen.print(
        f"  {out / 'trajectory.html'}   every step of the two texts above, in a browser",
    )
    for picture in pictures:
        screen.print(picture)


def _sample(screen: Console, model: Model, options: Options) -> TextSample:
    with progress("sampling") as show:
        began = time.perf_counter()
        drawn = model.sample(2, steps=options.steps, seed=options.seed, on_step=show)
        seconds = time.perf_counter() - began
    for text in drawn.text:
        screen.print(Panel(Text(text)))
    screen.print(
        f"{drawn.tokens.numel()} tokens in {options.steps} steps and a final denoise: "
        f"{drawn.nfe} forward passes, {seconds:.1f} s"
    )
    assert drawn.trajectory is not None
    screen.print(trajectory_panel(drawn.trajectory, model.tokenizer))
    return drawn


def _infill(screen: Console, model: Model, options: Options) -> None:
    screen.print(Text(_TEMPLATE, style="dim"))
    filled = model.infill(_TEMPLATE, n=3, steps=options.steps, seed=options.seed, temperature=0.7)
    for text in filled.text:
        screen.print(Text(f"  {text}"))


def _train(screen: Console, options: Options, out: Path) -> tuple[list[dict[str, Any]], float]:
    """A tokenizer of 512 tokens and a model of 0.2 M parameters: small enough for half a minute."""
    steps = options.train_steps
    config = RunConfig(
        process=ProcessConfig(kind="masked"),
        model=PRESETS["nano"],
        data=DataConfig(length=64, limit=100),
        optim=OptimConfig(lr=3e-3, warmup=min(30, steps), ema=0.98),
        train=TrainConfig(
            out=str(out), steps=steps, batch=32, micro_batch=32, seed=options.seed, device="cpu",
            log_every=10, eval_every=steps, eval_rows=128, save_every=0,
        ),
    )  # fmt: skip
    clear_run(out)
    tokenizer = TextTokenizer.train(read_documents("corpus:heldout"), 512)
    trainer = make_trainer(config, tokenizer)
    floor = unigram_entropy(trainer.rows, tokenizer.size)
    if not trainer.run():
        raise KeyboardInterrupt
    records = read_log(out / "log.jsonl")
    losses = [r["loss"] for r in records if "loss" in r]
    few = max(1, len(losses) // 20)
    first, last = np.mean(losses[:few]), np.mean(losses[-few:])
    screen.print(
        f"loss {first:.2f} -> {last:.2f} nats per token; token frequencies alone give {floor:.2f}"
    )
    return records, floor
