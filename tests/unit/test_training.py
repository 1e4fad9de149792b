"""Training steps: what they compute, however they are computed, and that something is learned."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import small_run, trainer_for

from xdlm import UserError, load
from xdlm.api import load_tokenizer
from xdlm.cli.train import read_rows
from xdlm.config import DataConfig, OptimConfig, ProcessConfig, RunConfig, TrainConfig
from xdlm.evaluation import unigram_entropy
from xdlm.models import PRESETS, DiT
from xdlm.training.checkpoint import RAW, latest_checkpoint, open_checkpoint
from xdlm.training.loss import LossSums
from xdlm.training.parallel import World
from xdlm.training.precision import WorkingCopy
from xdlm.training.runlog import read_log
from xdlm.training.trainer import Trainer


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("again", [False, True], ids=["whole", "by blocks, computed twice"])
def test_a_compiled_trunk_trains_alike(tmp_path: Path, again: bool) -> None:
    losses = []
    for compiled in (False, True):
        config = small_run(tmp_path / str(compiled), steps=3, save_every=0, log_every=1)
        train = replace(config.train, compile=compiled, activation_checkpointing=again)
        trainer = trainer_for(replace(config, train=train, model=replace(config.model, depth=1)))
        assert trainer.run()
        losses.append([r["loss"] for r in read_log(trainer.out / "log.jsonl")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def three_steps(config: RunConfig) -> tuple[list[torch.Tensor], int]:
    """Norms, losses and all gradients of three steps, and how often a block was run."""
    trainer, found, runs = trainer_for(config), [], []
    for block in trainer.engine.running.blocks:
        block.qkv.register_forward_hook(lambda *_: runs.append(1))
    take_step = trainer.optimizer.step

    def noted_step(rate: float) -> None:
        found.extend(p.grad.clone() for p in trainer.model.parameters())
        take_step(rate)

    trainer.optimizer.step = noted_step
    found += [trainer.take_step()[1] for _ in range(3)]
    return [*found, torch.tensor(trainer._mean_since_log())], len(runs)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_blocks_computed_twice_give_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: str
) -> None:
    """Dropout included: the second time a block removes the same numbers. Else the last block would be
    finished for some rows alone, which removes others."""
    monkeypatch.setattr(DiT, "_ends_alike", lambda model: False)
    config = small_run(tmp_path, precision=precision)
    assert config.model.dropout > 0
    twice = small_run(tmp_path, precision=precision, activation_checkpointing=True)
    (plain, runs), (again, more_runs) = three_steps(config), three_steps(twice)
    assert more_runs == 2 * runs
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("n", "size"), [(5, 2), (8, 4), (1, 3), (0, 2)])
def test_work_is_dealt_evenly_and_completely(n: int, size: int) -> None:
    dealt = [World(rank, size).deal(n) for rank in range(size)]
    assert len({len(part) for part in dealt}) == 1
    assert {number for part in dealt for number in part} == set(range(n))


def test_micro_batches_change_nothing_but_rounding(tmp_path: Path) -> None:
    """Losses, and above all gradients: the whole batch's mean, however it is cut up."""
    losses, norms = [], []
    for micro in (6, 4, 1):
        trainer = trainer_for(small_run(tmp_path / str(micro), micro_batch=micro))
        for block in trainer.model.blocks:
            block.dropout = 0.0
        norms.append([float(trainer.take_step()[1]) for _ in range(3)])
        losses.append(trainer._mean_since_log())
    for other in (1, 2):
        np.testing.assert_allclose(losses[0], losses[other], rtol=1e-5)
        np.testing.assert_allclose(norms[0], norms[other], rtol=1e-4)


def test_every_step_draws_new_noise(tmp_path: Path) -> None:
    trainer = trainer_for(small_run(tmp_path))
    seen = []
    trainer.loss = lambda model, batch, **kw: seen.append(batch.index) or _zero_loss(model)
    for _ in range(2):
        trainer.take_step()
    assert torch.cat(seen).tolist() == list(range(12))


def _zero_loss(model) -> LossSums:
    total = sum(p.sum() for p in model.parameters()) * 0.0
    return LossSums(total.double(), total.detach().double())


def test_validation_sees_the_averaged_weights(tmp_path: Path) -> None:
    seen = []

    def validate(trainer: Trainer) -> tuple[float, float]:
        seen.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
        assert not trainer.model.training
        return 1.0, 0.1

    trainer = trainer_for(small_run(tmp_path, steps=3, eval_every=3))
    trainer.validate = validate
    trainer.run()
    (averaged,) = seen
    assert all(torch.equal(averaged[name], value) for name, value in trainer.ema.average.items())
    own = dict(trainer.model.named_parameters())
    assert not torch.equal(own["out.bias"], averaged["out.bias"])
    (record,) = [r for r in read_log(tmp_path / "log.jsonl") if "val_nats" in r]
    assert record["val_ppl"] == pytest.approx(np.e)


def test_working_copy_follows_and_gives_back() -> None:
    """A bfloat16 copy runs; gradients add up in float32 on the weights that the optimiser sees."""
    master = DiT(PRESETS["nano"], 20)
    working = WorkingCopy(master, torch.bfloat16)
    with torch.no_grad():
        master.out.bias.add_(1.0)
    working.refresh()
    assert working.model.out.bias.dtype == torch.bfloat16
    assert (working.model.out.bias == 1).all()
    for _ in range(2):
        working.model.out.bias.sum().backward()
    assert master.out.bias.grad.dtype == torch.float32
    assert (master.out.bias.grad == 2).all() and working.model.out.bias.grad is None
    assert WorkingCopy(master, torch.float32).model is master


def test_a_bfloat16_trunk_trains_float32_weights(tmp_path: Path) -> None:
    trainer = trainer_for(small_run(tmp_path, steps=40, precision="bfloat16", log_every=10))
    assert not trainer.engine.working.is_master
    assert trainer.run()
    losses = [r["loss"] for r in read_log(tmp_path / "log.jsonl")]
    assert losses[-1] < losses[0] - 0.2
    saved = open_checkpoint(latest_checkpoint(tmp_path)).tensors(RAW)
    assert all(value.dtype == torch.float32 for value in saved.values())


def test_text_has_no_classes(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    config = replace(config, model=replace(config.model, n_classes=10))
    with pytest.raises(UserError, match="n_classes needs data with labels"):
        trainer_for(config)


def test_text_shorter_than_a_row(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    config = small_run(tmp_path / "run")
    tokenizer = load_tokenizer("pocket")
    rows = read_rows(str(tmp_path / "short.txt"), tokenizer, config.data)
    with pytest.raises(UserError, match="fewer than one row of 32"):
        Trainer(config, tokenizer, rows)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "uniform", "mixed", "gidd"])
def test_a_small_model_beats_token_frequencies(tmp_path: Path, kind: str) -> None:
    """The bound on the training text falls below the entropy of single tokens: it uses context.

    A text of few, regular sentences, so that half a minute on one core is enough.
    """
    generator = np.random.default_rng(0)
    who, did, what = (
        ["The cat", "A dog", "My aunt"],
        ["saw", "ate", "sold"],
        ["mice", "pies", "hats"],
    )
    lines = [
        f"{who[i]} {did[j]} {what[k]}." for i, j, k in generator.integers(0, 3, size=(4000, 3))
    ]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    config = RunConfig(
        process=ProcessConfig(kind=kind),
        model=PRESETS["nano"],
        data=DataConfig(train=str(tmp_path / "text.txt"), val=None, length=32),
        optim=OptimConfig(lr=5e-3, warmup=20, ema=0.98),
        train=TrainConfig(
            out=str(tmp_path / "run"), steps=150, batch=32, micro_batch=32, device="cpu",
            log_every=50, eval_every=0, save_every=0,
        ),
    )  # fmt: skip
    trainer = trainer_for(config)
    assert trainer.run()
    model = load(tmp_path / "run", device="cpu")
    assert model.weights == "ema"
    bound = model.perplexity_of(trainer.rows, draws=2, max_rows=64, batch=32)
    assert bound.nats_per_token + 3 * bound.nats_stderr < unigram_entropy(
        trainer.rows, trainer.tokenizer.size
    )
