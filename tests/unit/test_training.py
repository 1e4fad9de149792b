"""Training: the loss module, resuming after a kill, and learning something."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from xdlm import UserError, load
from xdlm.api import load_tokenizer
from xdlm.cli.train import read_rows
from xdlm.config import (
    DataConfig,
    LossConfig,
    OptimConfig,
    ProcessConfig,
    RunConfig,
    TrainConfig,
    dump_config,
)
from xdlm.evaluation import row_bounds, unigram_entropy
from xdlm.evaluation.likelihood import bent_times
from xdlm.models import PRESETS, DiT
from xdlm.noise import Masked, Mixed, NoiseProcess, Uniform
from xdlm.objective import nelbo, stratified_times
from xdlm.ops import gather
from xdlm.structs import Batch, Vocab
from xdlm.training.checkpoint import MODEL, OPTIMIZER, RAW, latest_checkpoint, open_checkpoint
from xdlm.training.ema import Ema
from xdlm.training.loss import DiffusionLoss, LossSums
from xdlm.training.muon import StackedMuon
from xdlm.training.noised import noised_in_torch
from xdlm.training.optimizer import clip_gradients, learning_rate
from xdlm.training.parallel import World, join_world, launcher, note_launch, started_again
from xdlm.training.precision import WorkingCopy
from xdlm.training.runlog import read_log
from xdlm.training.trainer import Trainer, find_resume


def small_run(out: Path, **train) -> RunConfig:
    settings = {
        "steps": 12, "batch": 6, "micro_batch": 4, "device": "cpu", "log_every": 1,
        "eval_every": 0, "save_every": 4, "seed": 5,
    }  # fmt: skip
    return RunConfig(
        process=ProcessConfig(kind="mixed", k=0.1),
        model=PRESETS["nano"].__class__(
            depth=1, width=32, heads=2, cond_width=8, dropout=0.1
        ),  # dropout on: its randomness must resume too
        data=DataConfig(length=32, limit=2),
        optim=OptimConfig(lr=1e-3, warmup=5),
        train=TrainConfig(out=str(out), **{**settings, **train}),  # type: ignore[arg-type]
    )


def trainer_for(config: RunConfig) -> Trainer:
    tokenizer = load_tokenizer("pocket")
    rows = read_rows(config.data.train, tokenizer, config.data, limit=config.data.limit)
    return Trainer(config, tokenizer, rows)


def start(config_file: Path, *flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "xdlm.cli.main", "train", str(config_file), *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(condition, process: subprocess.Popen, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


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


def test_a_run_may_be_spent_in_pieces_of_time(tmp_path: Path) -> None:
    config = small_run(tmp_path, steps=10_000, save_every=0)
    short = replace(config, train=replace(config.train, minutes=0.5 / 60))
    trainer = trainer_for(short)
    assert trainer.run()  # as asked
    assert 0 < trainer.step < 10_000
    saved = open_checkpoint(latest_checkpoint(tmp_path))
    assert saved.step == trainer.step
    again = trainer_for(replace(config, train=replace(config.train, minutes=0.2 / 60)))
    again.restore(saved)
    assert again.run() and again.step > saved.step
    with pytest.raises(UserError, match=r"train.minutes must be positive"):
        replace(config.train, minutes=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "ctrl-c"])
def test_stopped_and_resumed_equals_never_stopped(tmp_path: Path, how: int) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    steps = 60
    # The log averages over steps and does not fall in with the checkpoints: that must resume too.
    trainer = trainer_for(small_run(straight, steps=steps, save_every=0, log_every=4))
    assert trainer.run()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(small_run(broken, steps=steps, save_every=5, log_every=4)))
    process = start(recipe)
    wait_for(lambda: latest_checkpoint(broken) is not None, process)
    process.send_signal(how)
    process.wait(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    stopped_at = open_checkpoint(latest_checkpoint(broken)).step
    assert 0 < stopped_at < steps, "the run was over before it could be stopped"
    refused = start(recipe)
    assert refused.wait(timeout=60) == 2 and "--resume" in refused.stderr.read()
    resumed = start(recipe, "--resume")
    assert resumed.wait(timeout=120) == 0, resumed.stderr.read()
    a, b = (open_checkpoint(latest_checkpoint(run)) for run in (straight, broken))
    for file in (MODEL, RAW, OPTIMIZER):
        ours, theirs = a.tensors(file), b.tensors(file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    logs = [
        [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in read_log(run / "log.jsonl")]
        for run in (straight, broken)
    ]
    assert logs[0] == logs[1] and len(logs[0]) == steps // 4


@pytest.mark.parametrize("sent", [
    [signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGINT, signal.SIGINT],
], ids=["by a scheduler", "twice", "ctrl-c, passed on by a launcher"])  # fmt: skip
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, monkeypatch, sent: list[int]) -> None:
    trainer = trainer_for(small_run(tmp_path, save_every=0))
    take_step = trainer.take_step

    def interrupted_step() -> object:
        for number in sent if trainer.step == 3 else ():
            signal.raise_signal(number)
        return take_step()

    monkeypatch.setattr(trainer, "take_step", interrupted_step)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert not trainer.run()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "not given back"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert open_checkpoint(latest_checkpoint(tmp_path)).step == 4


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, monkeypatch) -> None:
    trainer = trainer_for(small_run(tmp_path))

    def interrupted_step() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.1)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trainer, "take_step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()


def test_a_run_started_again_is_known_by_its_launcher(tmp_path: Path, monkeypatch) -> None:
    """Not by the number of the run, which may be the same for all, or be used again."""
    note_launch(tmp_path, [launcher()])
    assert not started_again(tmp_path), "nobody launched it"
    for number in ("none", "job1"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", number)
        assert not started_again(tmp_path)
        note_launch(tmp_path, ["job1 another-node 7", launcher()])
        assert started_again(tmp_path)
        with monkeypatch.context() as later:
            later.setattr(os, "getppid", lambda: 1)
            assert not started_again(tmp_path)


@pytest.mark.parametrize(("variables", "missing"), [
    ({"WORLD_SIZE": "2"}, "RANK"), ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
    ({"WORLD_SIZE": "two", "RANK": "0"}, "'two'"),
])  # fmt: skip
def test_a_world_without_others_is_refused(
    monkeypatch, variables: dict[str, str], missing: str
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{missing}.*torchrun"), join_world():
        pass


def test_changed_settings_cannot_be_resumed(tmp_path: Path) -> None:
    trainer_for(small_run(tmp_path, steps=2)).run()
    other = small_run(tmp_path, steps=4, batch=8)
    with pytest.raises(UserError, match=r"train\.batch was 6 and is now 8"):
        trainer_for(other).restore(find_resume(tmp_path, resume=True))


def test_how_a_run_is_computed_may_change(tmp_path: Path) -> None:
    trainer_for(small_run(tmp_path, steps=2)).run()
    other = small_run(
        tmp_path, steps=4, parallel="fsdp", activation_checkpointing=True, micro_batch=3
    )
    trainer = trainer_for(other)
    trainer.restore(find_resume(tmp_path, resume=True))
    assert trainer.run()


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
def test_blocks_computed_twice_give_the_same_gradients(tmp_path: Path, precision: str) -> None:
    """Dropout included: the second time a block removes the same numbers."""
    config = small_run(tmp_path, precision=precision)
    assert config.model.dropout > 0
    twice = small_run(tmp_path, precision=precision, activation_checkpointing=True)
    (plain, runs), (again, more_runs) = three_steps(config), three_steps(twice)
    assert more_runs == 2 * runs
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


def test_clipping_is_torchs() -> None:
    for largest in (0.1, 100.0):
        ours, theirs = (torch.nn.Linear(3, 4) for _ in range(2))
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        norm = clip_gradients(ours, largest)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), largest)
        torch.testing.assert_close(norm.float(), expected)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(("n", "size"), [(5, 2), (8, 4), (1, 3), (0, 2)])
def test_work_is_dealt_evenly_and_completely(n: int, size: int) -> None:
    dealt = [World(rank, size).deal(n) for rank in range(size)]
    assert len({len(part) for part in dealt}) == 1
    assert {number for part in dealt for number in part} == set(range(n))


def test_keeps_only_so_many_checkpoints(tmp_path: Path) -> None:
    trainer_for(small_run(tmp_path, steps=5, save_every=1, keep=2)).run()
    assert [p.name for p in sorted(tmp_path.glob("step-*"))] == ["step-00000004", "step-00000005"]
    assert load(tmp_path, device="cpu").step == 5


def test_keeps_checkpoints_at_multiples_for_ever(tmp_path: Path) -> None:
    """Also across a stop: a resumed run drops none that the first one kept."""
    settings = {"save_every": 1, "keep": 1, "keep_every": 3}
    trainer_for(small_run(tmp_path, steps=5, **settings)).run()
    longer = trainer_for(small_run(tmp_path, steps=8, **settings))
    longer.restore(find_resume(tmp_path, resume=True))
    longer.run()
    names = [p.name for p in sorted(tmp_path.glob("step-*"))]
    assert names == ["step-00000003", "step-00000006", "step-00000008"]
    with pytest.raises(UserError, match=r"multiple of train.save_every \(2\), got 3"):
        small_run(tmp_path, save_every=2, keep_every=3)


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


def test_one_step_is_adamw_at_the_warmed_up_rate(tmp_path: Path) -> None:
    """After a first step from zero moments AdamW has moved each weight by the rate, in sign, less the
    decay; the second moment remembers 1 - beta2 of the squared gradient."""
    config = small_run(tmp_path)
    config = replace(
        config, optim=OptimConfig(lr=1e-2, warmup=5, beta1=0.8, beta2=0.9, weight_decay=0.1)
    )
    trainer = trainer_for(config)
    before = trainer.model.out.bias.detach().clone() + 0.0
    rate, _ = trainer.take_step()
    assert rate == pytest.approx(1e-2 / 5)
    moved = trainer.model.out.bias.detach() - before
    assert moved.abs().max() == pytest.approx(rate, rel=1e-3)
    (adamw,) = trainer.optimizer.parts
    state = adamw.state[trainer.model.out.bias]
    gradient = state["exp_avg"] / (1 - 0.8)
    torch.testing.assert_close(state["exp_avg_sq"], (1 - 0.9) * gradient**2, rtol=1e-4, atol=1e-12)
    assert adamw.param_groups[0]["weight_decay"] == 0.1


def with_muon(out: Path, **train) -> RunConfig:
    config = small_run(out, **train)
    return replace(config, optim=replace(config.optim, kind="muon"))


def test_muon_moves_matrices_of_blocks_alike_in_all_directions(tmp_path: Path) -> None:
    """By `0.2 sqrt(max(A, B))` times the rate in every singular direction that five iterations can bring
    up to it, which of so early a gradient are the first few; all other weights are AdamW's."""
    trainer = trainer_for(with_muon(tmp_path))
    matrix, bias = trainer.model.blocks[0].mlp_in.weight, trainer.model.out.bias
    before_bias = bias.detach().clone()
    rate, _ = trainer.take_step()
    assert (bias.detach() - before_bias).abs().max() == pytest.approx(rate, rel=1e-3)
    trainer.take_step()  # the gates are open now, and gradients reach the blocks
    before = matrix.detach().clone()
    rate, _ = trainer.take_step()
    sizes = torch.linalg.svdvals((matrix.detach() - before).double())
    unit = rate * 0.2 * max(matrix.shape) ** 0.5
    assert 0.7 * unit < sizes[0] < 1.3 * unit and sizes[7] > 0.5 * unit
    adamw, muon = (
        {name for p in part.param_groups[0]["params"] for name, q in trainer.model.named_parameters()
         if p is q}
        for part in trainer.optimizer.parts
    )  # fmt: skip
    assert adamw | muon == set(dict(trainer.model.named_parameters())) and not adamw & muon
    assert all(name.startswith("blocks.") and name.endswith("weight") for name in muon)
    assert {"embed.weight", "out.weight", "out.bias"} <= adamw


def test_muon_of_stacks_is_that_of_matrices() -> None:
    """Five steps of both: what they add up to is the same but for bfloat16's rounding. Either asks for the
    loss where that is given."""
    torch.manual_seed(0)
    shapes = [(16, 48), (48, 16), (16, 48), (24, 24)]
    start = [torch.randn(shape) for shape in shapes]
    ours, theirs = ([nn.Parameter(w.clone()) for w in start] for _ in range(2))
    stacked = StackedMuon(ours, lr=0.01, weight_decay=0.1)
    plain = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(5):

        def loss(parameters: list[nn.Parameter], seed: int = step) -> float:
            assert torch.is_grad_enabled()
            torch.manual_seed(seed)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape)
            return 0.5 + seed

        assert stacked.step(partial(loss, ours)) == plain.step(partial(loss, theirs)) == 0.5 + step
    for one, other, before in zip(ours, theirs, start, strict=True):
        assert (one - other).norm() < 0.01 * (other - before).norm()
        assert torch.equal(
            stacked.state[one]["momentum_buffer"], plain.state[other]["momentum_buffer"]
        )


def test_muon_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    whole = trainer_for(with_muon(tmp_path / "whole", steps=6))
    whole.run()
    trainer_for(with_muon(tmp_path / "parts", steps=3)).run()
    second = trainer_for(with_muon(tmp_path / "parts", steps=6))
    second.restore(find_resume(tmp_path / "parts", resume=True))
    second.run()
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, second.model.get_parameter(name)), name


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


def test_training_and_evaluation_tell_the_time() -> None:
    """A recording trunk: what it is told are the times at which its input was noised."""
    process, told = Masked(Vocab(20, 19)), []
    model = DiT(PRESETS["nano"], 20)
    trunk = model.trunk
    model.trunk = lambda z, t, label=None: told.append(t) or trunk(z, t, label)
    index = torch.arange(4)
    batch = Batch(torch.zeros(4, 6, dtype=torch.int64), index)
    DiffusionLoss(process)(model, batch, seed=3, step=2, global_batch=4)
    expected = stratified_times(3, 2, index, 4, time_range=process.time_range)
    torch.testing.assert_close(told.pop().double(), expected, rtol=1e-6, atol=1e-6)
    even = torch.rand(4, 1, dtype=torch.float64)
    row_bounds(model, process, batch.tokens, index, even, seed=3)
    drawn, start, end = told
    expected, _ = bent_times(even[:, 0], process.time_range)
    torch.testing.assert_close(drawn.double(), expected, rtol=1e-6, atol=1e-6)
    assert (start == 1).all()
    assert end.tolist() == pytest.approx([process.time_range[0]] * 4)


def test_text_has_no_classes(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    config = replace(config, model=replace(config.model, n_classes=10))
    with pytest.raises(UserError, match="n_classes needs data with labels"):
        trainer_for(config)


def test_loss_module_equals_nelbo_on_all_rows() -> None:
    """Skipping rows of zero weight, gathering and chunking change nothing."""
    process = Masked(Vocab(20, 19))
    torch.manual_seed(0)
    model = DiT(PRESETS["nano"], 20).eval()
    torch.nn.init.normal_(model.out.weight)
    batch = Batch(torch.randint(0, 19, (4, 16)), torch.arange(4))
    sums = DiffusionLoss(process)(model, batch, seed=3, step=0, global_batch=4)
    from xdlm.ops import Stream, uniform

    t = stratified_times(3, 0, torch.arange(4), 4, time_range=process.time_range)
    u = uniform(3, Stream.CORRUPT, torch.arange(4)[:, None], torch.arange(16)[None])
    z = process.corrupt(batch.tokens, t, uniform=u)
    low, high = process.time_range
    expected = nelbo(process, model(z, t), batch.tokens, z, t).double().sum() * (high - low)
    torch.testing.assert_close(sums.loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("process", [Masked(Vocab(12, 11)), Mixed(Vocab(12, 5), k=0.3)])
def test_rows_that_are_not_picked_change_nothing(monkeypatch, process) -> None:
    """A GPU rounds the number of rows up and puts the picked ones first; the loss is the same."""
    torch.manual_seed(0)
    model = DiT(PRESETS["nano"], 12)
    torch.nn.init.normal_(model.out.weight)
    known = torch.tensor([i for i in range(11) if i not in process.special_ids])
    batch = Batch(known[torch.randint(0, len(known), (4, 48))], torch.arange(4))
    loss = DiffusionLoss(process, kept_rows=0.2)
    found = []
    for multiple in (None, 64, 256):
        if multiple is not None:
            monkeypatch.setattr(
                gather.PickedRows, "order",
                lambda self, m=multiple: gather.padded_order(self._mask, int(self._mask.sum()), m),
            )  # fmt: skip
        model.zero_grad()
        sums = loss(model, batch, seed=0, step=0, global_batch=4)
        sums.loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([sums.loss.detach(), *gradients])
    for other in found[1:]:
        for ours, theirs in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_thinning_kept_rows_is_unbiased() -> None:
    config = ProcessConfig(kind="mixed", k=0.5)
    process = config.build(Vocab(20, 19))
    torch.manual_seed(0)
    model = DiT(PRESETS["nano"], 20).eval()
    torch.nn.init.normal_(model.out.weight)
    tokens = torch.randint(0, 19, (256, 16))
    full, thinned = [], []
    for repeat in range(12):
        batch = Batch(tokens, repeat * 256 + torch.arange(256))
        for rows, losses in ((1.0, full), (0.2, thinned)):
            loss = DiffusionLoss(process, kept_rows=rows)
            sums = loss(model, batch, seed=0, step=repeat, global_batch=256)
            losses.append(float(sums.elbo) / tokens.numel())
    difference = np.array(thinned) - np.array(full)
    assert difference.std() > 0
    assert abs(difference.mean()) < 4 * difference.std() / np.sqrt(len(difference))


@pytest.mark.parametrize(
    "process", [Mixed(Vocab(1001, 1000), k=k) for k in (0.001, 0.1, 0.9)] + [Uniform(Vocab(1000))]
)
def test_thinning_leaves_gradients_quiet(process: NoiseProcess) -> None:
    """Of a model that knows how frequent tokens are and no more, the worst case for unchanged ones: thinned
    by default, they add less to the second moment of the gradient than the changed ones have. Looked at
    evenly, two in a hundred, those of uniform noise would add twice as much as all others."""
    batch, length, n = 256, 32, 1000
    frequency = 1 / torch.arange(1.0, n + 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.multinomial(frequency, batch * length, replacement=True, generator=generator)
    x, index = x.view(batch, length), torch.arange(batch)
    t = stratified_times(0, 0, index, batch, time_range=process.time_range)
    found = noised_in_torch(process, process.coefs(t), x, index, 0, LossConfig().kept_rows)
    logits = torch.full((process.vocab.size,), -30.0)
    logits[:n] = frequency.log()
    logits = logits.expand(batch, length, -1).clone().requires_grad_()
    loss = nelbo(process, logits, x, found.z, t) * found.scale
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    moment = gradient.double().square().sum(-1)
    kept = found.z == x
    assert moment[kept].sum() < 0.75 * moment[~kept].sum()
    assert found.picked[kept].float().mean() < 0.25


def test_splitting_a_batch_over_processes_gives_the_same_noise() -> None:
    process = ProcessConfig().build(Vocab(20, 19))
    model = DiT(PRESETS["nano"], 20).eval()
    torch.nn.init.normal_(model.out.weight)
    tokens, index = torch.randint(0, 19, (8, 16)), 40 + torch.arange(8)
    loss = DiffusionLoss(process)

    def total(part: slice) -> float:
        batch = Batch(tokens[part], index[part])
        return float(loss(model, batch, seed=1, step=5, global_batch=8).elbo)

    whole = total(slice(None))
    for ways in (2, 4, 8):
        np.testing.assert_allclose(
            sum(total(slice(i, None, ways)) for i in range(ways)), whole, 1e-6
        )


def test_label_dropout_is_keyed_by_sample() -> None:
    loss = DiffusionLoss(Masked(Vocab(20, 19)), label_dropout=0.25)
    label, index = torch.arange(4000) % 10, torch.arange(4000)
    dropped = loss._drop_labels(label, index, seed=0)
    assert ((dropped == -1) | (dropped == label)).all()
    assert abs((dropped == -1).double().mean() - 0.25) < 0.03
    assert torch.equal(loss._drop_labels(label[1000:], index[1000:], seed=0), dropped[1000:])


def test_learning_rate() -> None:
    config = OptimConfig(lr=1.0, warmup=10, decay=20)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[50] == 1.0
    assert rates[90] == pytest.approx(0.5) and rates[99] == pytest.approx(0.05)
    assert learning_rate(OptimConfig(lr=1.0, warmup=0), 0, 10) == 1.0


def test_ema_follows_and_steps_aside() -> None:
    model = torch.nn.Linear(2, 2)
    ema = Ema(model, decay=0.5)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    ema.update(model, n_updates=1000)
    torch.testing.assert_close(ema.average["weight"], start + 0.5)
    young = Ema(model, decay=0.9)  # model is at start + 1; early on the average follows quickly
    with torch.no_grad():
        model.weight.add_(1.0)
    young.update(model, n_updates=1)
    torch.testing.assert_close(young.average["weight"], start + 1 + (1 - 2 / 11))
    with torch.no_grad():
        model.weight.sub_(1.0)
    with ema.applied(model):
        torch.testing.assert_close(model.weight, start + 0.5)
    torch.testing.assert_close(model.weight, start + 1.0)


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


def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    first = trainer_for(small_run(tmp_path / "first", steps=4))
    first.run()
    config = small_run(tmp_path / "second", steps=2, start=str(tmp_path / "first"))
    config = replace(config, process=ProcessConfig(kind="masked"))
    second = trainer_for(config)
    second.start_from(open_checkpoint(latest_checkpoint(tmp_path / "first")))
    for name, value in second.model.named_parameters():
        assert torch.equal(value, first.ema.average[name])
        assert torch.equal(second.ema.average[name], first.ema.average[name])
    second.run()
    assert load(tmp_path / "second").step == 2


def test_what_a_run_cannot_begin_with_is_named(tmp_path: Path) -> None:
    trainer_for(small_run(tmp_path / "first", steps=1)).run()
    checkpoint = open_checkpoint(latest_checkpoint(tmp_path / "first"))
    config = small_run(tmp_path / "second")
    wide = replace(config, model=replace(config.model, width=64))
    with pytest.raises(UserError, match=r"does not fit this recipe's model: .* has shape"):
        trainer_for(wide).start_from(checkpoint)
    with pytest.raises(UserError, match=r"does not fit this recipe's model: embed\.weight"):
        trainer_for(replace(config, process=ProcessConfig(kind="uniform"))).start_from(checkpoint)


def test_a_checkpoint_says_what_it_took(tmp_path: Path) -> None:
    """Over all parts of a run, and no more than passed."""
    began = time.monotonic()
    trainer_for(small_run(tmp_path, steps=4)).run()
    first = open_checkpoint(latest_checkpoint(tmp_path))
    again = trainer_for(small_run(tmp_path, steps=8))
    again.restore(first)
    time.sleep(0.2)  # what passes outside of the run does not count
    again.run()
    second = open_checkpoint(latest_checkpoint(tmp_path))
    assert 0 < first.meta["seconds"] < second.meta["seconds"] < time.monotonic() - began - 0.2
    assert second.meta["device"] == "cpu"
