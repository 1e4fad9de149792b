"""Recorded trunks: the same numbers as launched ones, and no stale ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from xdlm import UserError, Vocab
from xdlm.models import DiT, DiTConfig, run_body, run_trunk
from xdlm.models.graphed import release_recordings
from xdlm.noise import Masked, Mixed, NoiseProcess
from xdlm.sampling import SamplerConfig, ancestral, sample
from xdlm.structs import Batch
from xdlm.training.loss import DiffusionLoss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = DiTConfig(depth=2, width=64, heads=2, cond_width=16, dropout=0.2, time_conditioning=True)


def awake(config: DiTConfig = CONFIG) -> DiT:
    torch.manual_seed(0)
    model = DiT(config, 31)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.cuda()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(step)
    z = torch.randint(0, 31, (4, 48), device="cuda", generator=generator)
    return z, torch.rand(4, device="cuda", generator=generator)


def test_hidden_states_follow_inputs_and_weights() -> None:
    model = awake().eval()
    with torch.no_grad():
        for step in range(5):
            torch.testing.assert_close(run_trunk(model, *batch(step)), model.trunk(*batch(step)))
            for parameter in model.parameters():  # in place: the recording must see it
                parameter.mul_(1.05)
        moved = model.double().float()  # new addresses: the recording must go
        for step in range(4):
            torch.testing.assert_close(run_trunk(moved, *batch(step)), moved.trunk(*batch(step)))
        for step in range(4):  # another shape, recorded in its turn
            short = tuple(v[:2] for v in batch(step))
            torch.testing.assert_close(run_trunk(moved, *short), moved.trunk(*short))


@pytest.mark.parametrize("time_conditioning", [True, False])
def test_training_is_the_same_with_and_without(time_conditioning: bool) -> None:
    """Losses and gradients step by step, dropout included, also over accumulated micro-batches; without
    times, the last block is finished for the rows of the head alone."""
    config = replace(CONFIG, time_conditioning=time_conditioning)
    process = Mixed(Vocab(31, 30), k=0.1)
    loss = DiffusionLoss(process, kept_rows=0.1)
    seen: dict[bool, list[torch.Tensor]] = {}
    for replayable in (False, True):
        model = awake(config).train()
        model.replayable = replayable
        seen[replayable] = []
        for step in range(5):
            torch.manual_seed(step)
            for micro in range(2):
                index = torch.arange(4, device="cuda") + 4 * micro + 8 * step
                tokens = batch(10 * step + micro)[0] % 30
                sums = loss(model, Batch(tokens, index), seed=0, step=step, global_batch=8)
                (sums.loss / 384).backward()
            seen[replayable].append(sums.loss.detach())
            seen[replayable] += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
    for ours, theirs in zip(seen[True], seen[False], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-5)


def test_dropout_differs_from_replay_to_replay() -> None:
    model = awake().train()
    z, t = batch(0)
    passes = [run_trunk(model, z, t).detach().clone() for _ in range(5)]
    for i in range(5):
        for j in range(i):
            assert not torch.allclose(passes[i], passes[j])


def test_a_longer_sequence_does_not_spoil_an_earlier_recording() -> None:
    """It makes the model's table of angles anew, while a recording still reads the old one."""
    model = awake().eval()
    with torch.no_grad():
        expected = model.trunk(*batch(0)).clone()
        for _ in range(3):
            run_trunk(model, *batch(0))
        model.trunk(torch.zeros(1, 5000, dtype=torch.int64, device="cuda"), torch.zeros(1).cuda())
        filler = [torch.full((1024, 16), 7.0, device="cuda") for _ in range(64)]
        model.to("cuda")  # changes nothing
        torch.testing.assert_close(run_trunk(model, *batch(0)), expected)
        del filler


def gradients_of(model: DiT, step: int, *, recorded: bool) -> list[torch.Tensor | None]:
    """Through the trunk, and through its body and what is finished for every other row."""
    hidden = run_trunk(model, *batch(step)) if recorded else model.trunk(*batch(step))
    model.zero_grad()
    hidden.square().sum().backward()
    states = run_body(model, *batch(step)) if recorded else model.body(*batch(step))
    model.finish(states, torch.arange(0, 192, 2, device="cuda")).square().sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("time_conditioning", [True, False])
def test_what_is_trained_may_change(time_conditioning: bool) -> None:
    model = awake(replace(CONFIG, time_conditioning=time_conditioning)).eval()
    for frozen in (("embed", "blocks.0"), (), ("blocks.1",), ("modulation", "time_embed")):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        for step in range(4):
            ours = gradients_of(model, step, recorded=True)
            theirs = gradients_of(model, step, recorded=False)
            for a, b in zip(ours, theirs, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_training_the_head_alone() -> None:
    model = awake().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("out"))
    for step in range(4):
        assert not run_trunk(model, *batch(step)).requires_grad


def test_plain_torch_and_kernels_are_recorded_apart() -> None:
    model = awake().eval()
    with torch.no_grad():
        for _ in range(3):
            run_trunk(model, *batch(0))
        model.kernels = False
        with_plain = run_trunk(model, *batch(0)).clone()
        torch.testing.assert_close(with_plain, model.trunk(*batch(0)), rtol=0, atol=0)


def test_inference_mode_and_no_grad_take_turns() -> None:
    model = awake().eval()
    for step in range(4):
        with torch.inference_mode():
            run_trunk(model, *batch(step))
        with torch.no_grad():
            torch.testing.assert_close(run_trunk(model, *batch(step)), model.trunk(*batch(step)))


def test_gradients_asked_for_twice_are_two() -> None:
    model = awake().eval()
    parameters = [p for n, p in model.named_parameters() if not n.startswith("out")]
    taken = [
        torch.autograd.grad(run_trunk(model, *batch(step)).square().sum(), parameters)
        for step in range(4)
    ]
    expected = torch.autograd.grad(model.trunk(*batch(2)).square().sum(), parameters)
    for a, b in zip(taken[2], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    again = run_trunk(model, *batch(0)).sum()
    again.backward(retain_graph=True)
    with pytest.raises(UserError, match="run backward once"):
        again.backward()


def test_recordings_can_be_released() -> None:
    model = awake().eval()
    with torch.no_grad():
        for _ in range(3):
            run_trunk(model, *batch(0))
    release_recordings(model)
    with torch.no_grad():
        torch.testing.assert_close(run_trunk(model, *batch(1)), model.trunk(*batch(1)))


def test_a_second_forward_ends_the_first() -> None:
    model = awake().train()
    z, t = batch(0)
    for _ in range(2):
        run_trunk(model, z, t).sum().backward()
    first = run_trunk(model, z, t)
    run_trunk(model, z, t)
    with pytest.raises(UserError, match="run backward once, before the next forward"):
        first.sum().backward()


def test_samples_are_the_same_with_and_without() -> None:
    process = Mixed(Vocab(31, 30), k=0.1)
    drawn = []
    for replayable in (False, True):
        model = awake().eval()
        model.replayable = replayable
        result = sample(model, process, batch=4, length=256, config=SamplerConfig(steps=6), seed=3)
        drawn.append(result.tokens)
    assert (drawn[0] == drawn[1]).float().mean() > 0.99  # but for products that round differently


def test_a_batch_may_have_no_row_for_the_head() -> None:
    """All of it given: nothing is lost, and no gradient is anything but zero."""
    model = awake(replace(CONFIG, time_conditioning=False)).train()
    loss = DiffusionLoss(Masked(Vocab(31, 30)))
    for step in range(3):
        tokens = batch(step)[0] % 30
        given = torch.ones_like(tokens, dtype=torch.bool)
        index = torch.arange(4, device="cuda") + 4 * step
        sums = loss(model, Batch(tokens, index, given=given), seed=0, step=step, global_batch=4)
        sums.loss.backward()
        assert sums.loss.item() == 0 and sums.rows == 0
        assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("process", [Masked(Vocab(31, 30)), Mixed(Vocab(31, 30), k=0.3)])
def test_parts_of_a_batch_write_the_same(
    process: NoiseProcess, dtype: torch.dtype, monkeypatch
) -> None:
    """With many steps few sequences move in each, and others fill them up; replayed or not."""
    model = awake(replace(CONFIG, time_conditioning=False)).to(dtype).eval()
    config, drawn = SamplerConfig(steps=100), []
    for in_parts in (True, False):
        monkeypatch.setattr(ancestral, "_on_gpu", lambda _, there=in_parts: there)
        drawn.append(sample(model, process, batch=32, length=8, config=config, seed=3).tokens)
    assert (drawn[0] == drawn[1]).float().mean() > 0.99  # but for products that round differently
