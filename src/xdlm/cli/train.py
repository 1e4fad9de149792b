"""`xdlm train RECIPE`: train a model."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

from xdlm.api import load_tokenizer
from xdlm.cli.options import parse
from xdlm.cli.progress import progress
from xdlm.config import DataConfig, RunConfig, load_config
from xdlm.data import Rows, pack, read_documents
from xdlm.errors import UserError
from xdlm.evaluation import likelihood
from xdlm.tokens import TextTokenizer
from xdlm.training.trainer import Trainer, find_resume

_DESCRIPTION = """Train a model. RECIPE is a YAML file; every field can be overridden by a flag.

Checkpoints, the resolved configuration and log.jsonl go to --train.out. Ctrl-C saves and stops;
--resume goes on from the newest checkpoint, bit for bit.

examples:
  xdlm train recipes/cpu-tiny.yaml
  xdlm train recipes/cpu-tiny.yaml --data.train my-texts/ --train.steps 500 --train.out runs/mine
  xdlm train recipes/cpu-tiny.yaml --resume
"""
#: Batches of validation rows go through the model so many at a time.
_EVAL_BATCH = 64


def run(arguments: list[str]) -> None:
    arguments, resume = _take_flag(arguments, "--resume")
    recipe, flags = _take_recipe(arguments)
    config = parse(
        RunConfig, flags, prog="xdlm train [RECIPE] [--resume]", description=_DESCRIPTION,
        default=load_config(recipe) if recipe else RunConfig(),
    )  # fmt: skip
    if recipe is None:
        raise UserError("which recipe? for example: xdlm train recipes/cpu-tiny.yaml")
    checkpoint = find_resume(Path(config.train.out), resume=resume)
    tokenizer = load_tokenizer(config.data.tokenizer)
    trainer = make_trainer(config, tokenizer)
    if checkpoint is not None:
        trainer.restore(checkpoint)
    if not trainer.run():
        sys.exit(130)


def make_trainer(config: RunConfig, tokenizer: TextTokenizer) -> Trainer:
    """Read and pack the data, and put validation and training together."""
    data = config.data
    rows = read_rows(data.train, tokenizer, data, limit=data.limit)
    if data.val is None or config.train.eval_every == 0:
        return Trainer(config, tokenizer, rows)
    val = read_rows(data.val, tokenizer, data)
    if len(val) == 0:
        raise UserError(f"the validation text {data.val} is shorter than one row of {data.length}")

    def validate(trainer: Trainer) -> tuple[float, float]:
        result = likelihood(
            trainer.model, trainer.process, val, draws=2, batch=_EVAL_BATCH,
            max_rows=config.train.eval_rows,
        )  # fmt: skip
        return result.nats_per_token, result.nats_stderr

    return Trainer(config, tokenizer, rows, validate=validate)


def read_rows(
    source: str, tokenizer: TextTokenizer, data: DataConfig, *, limit: int | None = None
) -> Rows:
    with progress(f"tokenising {source}") as show:
        return pack(
            islice(read_documents(source), limit), tokenizer, data.length, bos=data.bos,
            eos=data.eos, on_document=lambda n: show(n, n + 1),
        )  # fmt: skip


def _take_recipe(arguments: list[str]) -> tuple[str | None, list[str]]:
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    return None, arguments


def _take_flag(arguments: list[str], flag: str) -> tuple[list[str], bool]:
    return [a for a in arguments if a != flag], flag in arguments
