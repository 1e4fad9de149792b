"""`xdlm train RECIPE`: train a model."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

from xdlm.api import tokenizer_of
from xdlm.cli.options import parse
from xdlm.cli.progress import progress
from xdlm.config import DataConfig, RunConfig, load_config
from xdlm.data import Rows, load_images, load_pairs, load_rows
from xdlm.errors import UserError
from xdlm.evaluation import likelihood
from xdlm.files import check_writable
from xdlm.tokens import Codes, ImageTokenizer, Tokenizer
from xdlm.training.curves import check_curves
from xdlm.training.device import pick_own_device
from xdlm.training.parallel import World, join_world, refuse_second_run, started_again
from xdlm.training.resuming import find_resume
from xdlm.training.trained import check_start, find_model
from xdlm.training.trainer import Trainer

_DESCRIPTION = """Train a model. RECIPE is a YAML file; every field can be overridden by a flag.

Checkpoints, the resolved configuration and log.jsonl go to --train.out. Ctrl-C, or SIGTERM, saves and
stops; --resume goes on from the newest checkpoint, bit for bit.

A line of the log holds the loss, the bound (elbo), the gradient's norm, the learning rate, tokens/s, the
share of the time spent waiting for data (data_wait), peak memory and, on a GPU that is known, the model's
share of its peak (mfu). --train.tensorboard and --train.wandb PROJECT draw them too.

examples:
  xdlm train recipes/cpu-tiny.yaml
  xdlm train recipes/cpu-tiny.yaml --data.train my-texts/ --train.steps 500 --train.out runs/mine
  xdlm train recipes/cpu-tiny.yaml --resume
  xdlm train recipes/cpu-tiny.yaml --train.start runs/mdlm --train.out runs/adapted
  torchrun --nproc-per-node 8 --max-restarts 3 -m xdlm.cli.main train recipes/owt/xdlm-k0.1.yaml
  torchrun --nproc-per-node 8 -m xdlm.cli.main train recipes/owt/xdlm-k0.1.yaml --train.parallel fsdp

Under torchrun every process takes its share of each batch, and the result does not depend on their number
but for rounding (and dropout). Started again after a process died, a run goes on by itself. A run may be
resumed on another number of processes, with or without fsdp, and with another micro_batch. A folder
belongs to one run at a time.
"""
#: Batches of validation rows go through the model so many at a time.
_EVAL_BATCH = 32


@dataclass(frozen=True)
class Options(RunConfig):
    resume: bool = False
    """Go on from the newest checkpoint in --train.out."""


def run(arguments: list[str]) -> None:
    recipe, flags = _take_recipe(arguments)
    recipe_config = load_config(recipe) if recipe else RunConfig()
    sections = {f.name: getattr(recipe_config, f.name) for f in dataclasses.fields(RunConfig)}
    options = parse(
        Options, flags, prog="xdlm train RECIPE", description=_DESCRIPTION,
        default=Options(**sections),
    )  # fmt: skip
    if recipe is None:
        raise UserError("which recipe? for example: xdlm train recipes/cpu-tiny.yaml")
    config = RunConfig(**{name: getattr(options, name) for name in sections})
    config.refuse_idle()
    pick_own_device(config.train.device)  # complain before anything is read
    check_curves(config.train)
    check_writable(Path(config.train.out), make=False)
    refuse_second_run(
        Path(config.train.out)
    )  # it says more than that there is a checkpoint already
    with join_world() as world:
        out = Path(config.train.out)
        again = world.any(started_again(out))
        checkpoint = find_resume(out, resume=options.resume, again=again)
        world.wait()  # before the first of them writes a checkpoint
        first = config.start() if checkpoint is None else None
        start = None if first is None else find_model(first)
        if start is not None:
            check_start(start, config)  # complain before a large model is made
        trainer = make_trainer(config, tokenizer_of(config.data), world)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        elif start is not None:
            trainer.start_from(start)
        trainer.run()
    if trainer.ended_by is not None:
        if world.is_main:
            print("go on with --resume", file=sys.stderr)
        sys.exit(128 + trainer.ended_by)  # as shells say it: 130 for Ctrl-C, 143 for SIGTERM


def make_trainer(config: RunConfig, tokenizer: Tokenizer, world: World | None = None) -> Trainer:
    """Read and pack the data, and put validation and training together."""
    data = config.data
    if isinstance(tokenizer, Codes):
        tokenizer.to(pick_own_device(config.train.device))
    rows = _training_rows(tokenizer, data)
    if data.val is None or config.train.eval_every == 0:
        return Trainer(config, tokenizer, rows, world=world)
    val = read_rows(data.val, tokenizer, data)
    if len(val) == 0:
        raise UserError(f"the validation text {data.val} is shorter than one row of {data.length}")
    val.check_classes(config.model.n_classes)

    def validate(trainer: Trainer) -> tuple[float, float]:
        result = likelihood(
            trainer.model, trainer.process, val, draws=2, batch=_EVAL_BATCH,
            max_rows=config.train.eval_rows, world=trainer.world,
        )  # fmt: skip
        return result.nats_per_token, result.nats_stderr

    return Trainer(config, tokenizer, rows, validate=validate, world=world)


def _training_rows(tokenizer: Tokenizer, data: DataConfig) -> Rows:
    if isinstance(tokenizer, ImageTokenizer):
        with progress(f"reading {data.train}") as show:
            return load_images(
                data.train, tokenizer, mirrored=data.flips, limit=data.limit, on_progress=show
            )
    if data.pairs:
        with progress(f"reading {data.train}") as show:
            return load_pairs(
                data.train, tokenizer, data.length, bos=data.bos, limit=data.limit, on_progress=show
            )
    return read_rows(data.train, tokenizer, data, limit=data.limit)


def read_rows(
    source: str, tokenizer: Tokenizer, data: DataConfig, *, limit: int | None = None
) -> Rows:
    """As they are: no image is mirrored."""
    with progress(f"reading {source}") as show:
        if isinstance(tokenizer, ImageTokenizer):
            return load_images(source, tokenizer, limit=limit, on_progress=show)
        return load_rows(
            source, tokenizer, data.length, bos=data.bos, eos=data.eos, frame=data.frame,
            limit=limit, on_progress=show,
        )  # fmt: skip


def _take_recipe(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The recipe is the first argument, or the one that ends in .yaml."""
    for i, argument in enumerate(arguments):
        if argument.endswith((".yaml", ".yml")) or (i == 0 and not argument.startswith("-")):
            return argument, arguments[:i] + arguments[i + 1 :]
    return None, arguments
