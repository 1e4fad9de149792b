"""The training loop, of one process or of several that train together."""

from __future__ import annotations

import hashlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from xdlm.config import RunConfig
from xdlm.data import Rows
from xdlm.errors import UserError
from xdlm.files import check_writable
from xdlm.ops.rows import fused_obstacle, resolve_impl
from xdlm.tokens import Tokenizer
from xdlm.training.adapters import frozen_parameters, trained_parameters
from xdlm.training.checkpoint import (
    BASE,
    MODEL,
    OPTIMIZER,
    RAW,
    Checkpoint,
    Content,
    checkpoint_folder,
    clear_scratch,
    latest_checkpoint,
    step_of,
)
from xdlm.training.curves import open_curves
from xdlm.training.device import describe, pick_own_device, pick_precision
from xdlm.training.drafts import draft
from xdlm.training.ema import Ema
from xdlm.training.engine import make_engine
from xdlm.training.fingerprints import fingerprint
from xdlm.training.folders import Source
from xdlm.training.interrupts import interruptible
from xdlm.training.loader import Loader, StepBatches
from xdlm.training.loss import make_loss
from xdlm.training.meter import Meter
from xdlm.training.optimizer import Optimizer, clip_gradients, learning_rate
from xdlm.training.parallel import World, launcher, note_launch, only_run_in
from xdlm.training.resuming import check_same_run
from xdlm.training.runlog import RunLog, SilentLog
from xdlm.training.saving import Saver
from xdlm.training.sharding import own_part
from xdlm.training.trained import read_base, read_start

#: What a process may say before a step, from good to bad.
_GO_ON, _TIME_IS_UP, _INTERRUPTED, _TERMINATED, _FAILED = range(5)
#: What a signal has a process say, and back: what all of them end with.
_SIGNALS = {_INTERRUPTED: signal.SIGINT, _TERMINATED: signal.SIGTERM}
_VERDICTS = {number: verdict for verdict, number in _SIGNALS.items()}
#: A validation takes the model and gives nats per token and their standard error. All processes do it
#: together, and all get the same.
Validate = Callable[["Trainer"], tuple[float, float]]


class Trainer:
    """A run: model, averages, optimiser and the number of steps done.

    Everything random in a step depends on (seed, step) alone, so a run that goes on from a
    checkpoint repeats, bit for bit, what it would have done without the stop.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        rows: Rows,
        *,
        validate: Validate | None = None,
        console: Console | None = None,
        world: World | None = None,
    ) -> None:
        if len(rows) == 0:
            raise UserError(
                f"the training text has {rows.n_tokens} tokens, fewer than one row of "
                f"{config.data.length}; give more text or a smaller data.length"
            )
        if config.model.n_classes and not rows.n_classes:
            raise UserError("model.n_classes needs data with labels, and this has none; remove it")
        rows.check_classes(config.model.n_classes)
        self.config, self.tokenizer, self.rows = config, tokenizer, rows
        self.world = world if world is not None else World()
        self._share = self.world.share(config.train.batch)
        self.validate, self.console = validate, console or Console(stderr=True, emoji=False)
        self.device = pick_own_device(config.train.device)
        self.precision = pick_precision(config.train.precision, self.device)
        vocab = config.vocab(tokenizer.size)
        self.process = config.process.build(vocab)
        torch.manual_seed(config.train.seed)
        # `start_from` or `restore` will bring the weights, if they are not to be random.
        blank = draft(config, vocab.size, to_be_read=bool(config.start()))
        self.model = blank.denoiser
        self.engine = make_engine(self.model, config.train, self.precision, self.device, self.world)
        blank.fill()
        self.ema = Ema(self.model, config.optim.ema)
        self.optimizer = Optimizer(self.model, config.optim)
        self.loss = make_loss(config, self.process)
        self._head = self._head_impl()
        self.data_hash = rows.digest
        self.loader: StepBatches = Loader(
            rows, seed=config.train.seed, batch=config.train.batch, share=self._share,
            micro_batch=config.train.micro_batch, device=self.device,
            labelled=config.model.n_classes > 0,
            check=None if self.process is None else self.process.check_data,
        )  # fmt: skip
        self.meter = Meter(
            self.engine.running, self.device, self.precision, batch=config.train.batch, length=rows.length,
            processes=self.world.size,
        )  # fmt: skip
        self.step = 0
        self._base: str | None = None  # the fingerprint of what adapters stand beside
        self._before, self._began = 0.0, time.monotonic()
        # This process's sums since the last line of the log, loss and bound, and the number of steps.
        # Saved with the state, so that a resumed run writes the same log.
        self._since_log = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.out = Path(config.train.out)
        self._saver = Saver(self.out, self.world, sharded=self.engine.sharded)
        self._saved_at: int | None = None
        self.ended_by: signal.Signals | None = None

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> bool:
        """Train to the last step, or until the time is up. False if a signal ended it early (`ended_by`
        says which); either way the state is saved."""
        config = self.config.train
        end = math.inf if config.minutes is None else time.monotonic() + 60 * config.minutes
        if self.step > config.steps:
            raise UserError(
                f"the run is at step {self.step} already, past train.steps {config.steps}"
            )
        self.world.check_agreement(
            step=self.step, data=self.data_hash, tokenizer=self.tokenizer.digest,
            config=repr(self.config), weights=self._weight_sum(),
        )  # fmt: skip
        n_parameters = sum(p.numel() for p in self.model.parameters())
        n_trained = sum(p.numel() for p in trained_parameters(self.model).values())
        with (
            self._own_folder(),
            self._open_log() as log,
            interruptible() as interrupted,
            self.loader.ahead(range(self.step, config.steps)),
            self._saver,
        ):
            log.say(
                f"{n_parameters / 1e6:.1f} M parameters"
                + (f" ({n_trained / 1e6:.1f} M trained)" if n_trained < n_parameters else "")
                + f", {len(self.rows):,} rows of "
                f"{self.rows.length} tokens, {describe(self.device)}, "
                f"{str(self.precision).removeprefix('torch.')} trunk, {self._head}"
                + (f", {self.world.size} x {config.parallel}" if self.world.size > 1 else "")
            )
            self.meter.begin(self.step)
            self._began = time.monotonic()
            verdict = _GO_ON
            while self.step < config.steps:
                late = _TIME_IS_UP if time.monotonic() > end else _GO_ON
                came = interrupted()
                verdict = self._vote(late if came is None else _VERDICTS[came])
                if verdict != _GO_ON:
                    break
                rate, norm = self.take_step()
                if self.step % config.log_every == 0 or self.step == config.steps:
                    loss, elbo = self._mean_since_log()
                    figures = self.meter.read(self.step)
                    log.record(
                        step=self.step, loss=loss, elbo=elbo, grad_norm=norm.item(), lr=rate,
                        **figures,
                    )  # fmt: skip
                    log.show(self.step, f"loss {loss:.3f}  {_si(figures['tokens_per_s'])} tok/s")
                    self.meter.begin(self.step)
                if self._due(config.eval_every) and self.validate is not None:
                    self._validate(log)
                    self.meter.begin(self.step)
                if self._due(config.save_every):
                    self.save()
                    self.meter.begin(self.step)
            if self._saved_at != self.step:
                self.save()
            self._vote(wait=True)
            finished = self.step == config.steps
            where = checkpoint_folder(self.out, self.step)
            log.say(f"{'' if finished else f'stopped at step {self.step}, '}saved {where}")
        self.ended_by = _SIGNALS.get(verdict)
        return self.ended_by is None

    def take_step(self) -> tuple[float, torch.Tensor]:
        """One optimiser step. Returns the learning rate and the gradient's norm before clipping."""
        config = self.config
        batch = config.train.batch
        # Dropout is the one thing that uses torch's own generator: a new seed for each step.
        torch.manual_seed(_mixed_seed(config.train.seed, self.step, self.world.rank))
        rate = learning_rate(config.optim, self.step, config.train.steps)
        self.engine.refresh()
        running = self.engine.running.train()
        n_tokens = self.loader.n_learned(self.step)
        for part, last in self.meter.waiting(self.loader.batches(self.step)):
            sums = self.loss(
                running, part, seed=config.train.seed, step=self.step, global_batch=batch
            )
            self.engine.backward(sums.loss / n_tokens, last=last)
            self._since_log[0] += sums.loss.detach() / n_tokens
            self._since_log[1] += sums.elbo / n_tokens
            self.meter.count(tokens=part.tokens.numel(), head_rows=sums.rows)
        self._since_log[2] += 1
        norm = clip_gradients(self.model, config.optim.clip, self.engine.total)
        self.optimizer.step(rate)
        self.step += 1
        self.ema.update(self.model, self.step)
        return rate, norm

    def _mean_since_log(self) -> tuple[float, float]:
        """Loss and bound per token, averaged over the steps since the last line of the log."""
        self._gather_log()
        loss, elbo, count = self._since_log.tolist()
        self._since_log.zero_()
        return loss / count, elbo / count

    def _gather_log(self) -> None:
        """Bring what all processes have added up to the first one. All of them see it, and end together if
        the run has diverged."""
        self.world.add_up(self._since_log[:2])
        loss = float(self._since_log[0])
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} at step {self.step}; lower optim.lr")
        if not self.world.is_main:
            self._since_log[:2] = 0

    def _head_impl(self) -> str:
        """How the head runs, and why not with kernels where nobody said so. What cannot run is an error."""
        if not self.model.linear_head:
            able = self.model.has_kernel_for(torch.empty(0, device=self.device))
            wanted = self.config.loss.impl
            if wanted == "fused" and not able:
                raise UserError(
                    "loss.impl 'fused' has no kernel for this model's head here; use 'auto'"
                )
            if wanted in ("auto", "fused"):
                return "fused head" if able else "head without kernels"
            return "dense head"
        impl = resolve_impl(self.config.loss.impl, self.device)
        obstacle = fused_obstacle(self.device) if self.config.loss.impl == "auto" else None
        return f"{impl} head ({obstacle})" if obstacle else f"{impl} head"

    @contextmanager
    def _own_folder(self) -> Iterator[None]:
        """Have the run's folder to ourselves, and in order."""
        launchers = self.world.collect({self.world.rank: launcher()}).values()
        if not self.world.is_main:
            yield
            return
        check_writable(self.out)
        with only_run_in(self.out):
            newest = latest_checkpoint(self.out)
            if newest is not None and step_of(newest) > self.step:
                raise UserError(
                    f"{newest} is of a later step than {self.step}, where this run would begin"
                )
            clear_scratch(self.out)
            note_launch(self.out, launchers)
            yield

    def _open_log(self) -> RunLog | SilentLog:
        if not self.world.is_main:
            return SilentLog()
        return RunLog(
            self.out, total=self.config.train.steps, start=self.step, console=self.console,
            curves=open_curves(self.config, self.out, start=self.step),
        )  # fmt: skip

    def _vote(self, own: int = _GO_ON, *, wait: bool = False) -> int:
        """The worst that any process has to say. A checkpoint that somebody could not write ends the run on
        all of them; `wait` makes sure that none is still being written."""
        failure = self._saver.failure(wait=wait)
        worst = self.world.highest(_FAILED if failure is not None else own)
        if failure is not None:
            raise failure
        if worst == _FAILED:
            raise UserError("another process could not write a checkpoint")
        return worst

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _validate(self, log: RunLog | SilentLog) -> None:
        assert self.validate is not None
        self.model.eval()
        with self.ema.applied(self.model):
            nats, stderr = self.validate(self)
        self.engine.release()
        if not math.isfinite(nats):
            raise UserError(f"the validation bound is {nats} at step {self.step}; lower optim.lr")
        ppl = math.exp(min(nats, 700.0))
        log.record(step=self.step, val_nats=nats, val_stderr=stderr, val_ppl=ppl)
        log.say(f"step {self.step}: validation perplexity {ppl:.2f} (averaged weights)")

    # -- state -----------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """What the run has taken so far, earlier parts of it and validations included."""
        return self._before + time.monotonic() - self._began

    def save(self) -> None:
        """Begin to write a checkpoint, and then to drop old ones that neither `keep` nor `keep_every`
        asks for."""
        self._check_finite()
        self._vote(wait=True)
        self._gather_log()
        self._saver.save(
            Content(
                config=self.config,
                tokenizer_files=self.tokenizer.files(),
                step=self.step,
                tensors={
                    MODEL: self.ema.average,
                    RAW: trained_parameters(self.model),
                    OPTIMIZER: self.optimizer.tensors(),
                },
                extra={
                    "data_sha256": self.data_hash,
                    "device": describe(self.device),
                    "seconds": round(self.seconds, 3),
                    "tokens": self.step * self.config.train.batch * self.rows.length,
                    "since_log": self._since_log.tolist(),
                    **({} if self._base is None else {BASE: self._base}),
                },
            )
        )
        self._saved_at = self.step

    def _weight_sum(self) -> float:
        parts = [own_part(p.detach()).double().sum() for p in self.model.parameters()]
        return float(self.engine.total(torch.stack(parts).sum()))

    def _check_finite(self) -> None:
        """A run that has diverged must not push good checkpoints out."""
        if not math.isfinite(self._weight_sum()):
            raise UserError(
                f"the weights are not finite at step {self.step}: nothing saved; lower optim.lr"
            )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of the same run."""
        check_same_run(checkpoint.config, self.config)
        if checkpoint.tokenizer().to_json() != self.tokenizer.to_json():
            raise UserError(
                f"cannot resume: {self.config.data.tokenizer} is not the tokenizer it was"
            )
        if checkpoint.meta.get("data_sha256") != self.data_hash:
            raise UserError(f"cannot resume: {self.config.data.train} is not the text it was")
        if self.config.lora.rank:
            known = checkpoint.meta.get(BASE)
            self._base = read_base(self.config, frozen_parameters(self.model), known=known)
        checkpoint.read_into(RAW, trained_parameters(self.model))
        checkpoint.read_into(MODEL, self.ema.average)
        if checkpoint.step > 0:
            self.optimizer.restore(checkpoint)
        self._since_log.copy_(torch.tensor(checkpoint.meta["since_log"], dtype=torch.float64))
        if not self.world.is_main:
            self._since_log[:2] = 0
        self.step = self._saved_at = checkpoint.step
        self._before = float(checkpoint.meta.get("seconds", 0.0))

    def start_from(self, checkpoint: Source) -> None:
        """Begin a run of its own with the weights of another, averaged ones if it has them."""
        if checkpoint.tokenizer().to_json() != self.tokenizer.to_json():
            raise UserError(
                f"train.start: {checkpoint.folder} has another tokenizer than data.tokenizer"
            )
        trained = trained_parameters(self.model)
        if self.config.lora.rank:
            self._base = fingerprint(checkpoint.weight_files())
        weights = frozen_parameters(self.model) if self.config.lora.rank else trained
        read_start(checkpoint, self.config, weights)
        for name, average in self.ema.average.items():
            average.copy_(trained[name].detach())


def _mixed_seed(*numbers: int) -> int:
    """One seed from several numbers, all of them in its lowest bits: a CPU's generator takes only 32."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _si(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"
