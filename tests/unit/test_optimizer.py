"""The optimisers, their rate, clipping, and the averages of the weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from small_runs import small_run, trainer_for
from torch import nn

from xdlm.config import OptimConfig, RunConfig
from xdlm.training.ema import Ema
from xdlm.training.muon import StackedMuon
from xdlm.training.optimizer import clip_gradients, learning_rate
from xdlm.training.resuming import find_resume


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


def test_learning_rate() -> None:
    config = OptimConfig(lr=1.0, warmup=10, decay=20)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[50] == 1.0
    assert rates[90] == pytest.approx(0.5) and rates[99] == pytest.approx(0.05)
    assert learning_rate(OptimConfig(lr=1.0, warmup=0), 0, 10) == 1.0


def test_without_decay_the_weights_are_their_own_average() -> None:
    """A large model is not held twice."""
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    ema = Ema(model, decay=0.0)
    with torch.no_grad():
        model.weight.add_(1.0)
    ema.update(model, n_updates=1)
    model.weight.data = model.weight.data.clone()  # as sharding may move it
    with ema.applied(model):
        assert ema.average.keys() == {"weight"}
        assert ema.average["weight"].data_ptr() == model.weight.data_ptr()


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
