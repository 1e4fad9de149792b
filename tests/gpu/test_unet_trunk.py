"""The U-Net's kernels against plain torch, and its recordings against launches, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from xdlm import Vocab
from xdlm.models import UNet, UNetConfig, drawing_head, head_stats, run_trunk
from xdlm.noise import Mixed
from xdlm.ops.head import Guide
from xdlm.sampling import Guidance, SamplerConfig, sample
from xdlm.training.device import compile_trunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = UNetConfig(side=16, channels=48, multipliers="1-2", attention=8, dropout=0.0, n_classes=3)


def awake(dtype: torch.dtype) -> UNet:
    torch.manual_seed(0)
    model = UNet(CONFIG, 257)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to("cuda", dtype).train()


def inputs(step: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(step)
    z = torch.randint(0, 257, (4, 768), device="cuda", generator=generator)
    t = torch.rand(4, device="cuda", generator=generator)
    return z, t, torch.arange(4, device="cuda") % 3 - 1


def hidden_and_gradients(model: UNet) -> dict[str, Tensor]:
    model.zero_grad()
    hidden = model.trunk(*inputs())
    generator = torch.Generator("cuda").manual_seed(2)
    weight = torch.randn(hidden.shape, device="cuda", generator=generator)
    (hidden * weight).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach(), **gradients}


def error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kernels_are_as_exact_as_plain_torch(dtype: torch.dtype) -> None:
    truth, model = hidden_and_gradients(awake(dtype).double()), awake(dtype)
    ours = hidden_and_gradients(model)
    model.kernels = False
    plain = hidden_and_gradients(model)
    for name, exact in truth.items():
        assert error(ours[name], exact) <= 2 * error(plain[name], exact) + 1e-5, name


def test_recordings_follow_inputs_and_weights() -> None:
    model = awake(torch.float32).eval()
    with torch.no_grad():
        for step in range(4):
            torch.testing.assert_close(run_trunk(model, *inputs(step)), model.trunk(*inputs(step)))
            for parameter in model.parameters():
                parameter.mul_(1.01)


def test_training_is_the_same_with_and_without_recordings() -> None:
    seen: dict[bool, list[Tensor]] = {}
    for replayable in (False, True):
        model = awake(torch.float32)
        model.replayable, seen[replayable] = replayable, []
        for step in range(4):
            hidden = run_trunk(model, *inputs(step))
            hidden.square().mean().backward()
            seen[replayable] += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
    for ours, theirs in zip(seen[True], seen[False], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("summed", [True, False])
def test_the_head_is_as_exact_as_plain_torch(summed: bool) -> None:
    model, n = awake(torch.float32), 5000
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randint(0, 256, (n,), device="cuda", generator=generator)
    z = torch.randint(0, 300, (n,), device="cuda", generator=generator).clamp_max(256)
    log_c = torch.linspace(-6, 12, n, dtype=torch.float64, device="cuda") if summed else None
    place = torch.rand(n, device="cuda", generator=generator) * 2.4 - 1.2
    rows = torch.stack([place, torch.linspace(-9, 9, n, device="cuda")], -1)

    def found(impl: str, dtype: torch.dtype) -> list[Tensor]:
        hidden = rows.to(dtype).requires_grad_()
        stats = head_stats(model, hidden, x, z, log_c, mask_id=256, impl=impl)
        log_z = torch.where(z < 256, stats.logit_z - stats.lse, 0.0)
        values = [stats.logit_x - stats.lse, log_z, stats.S.double()]
        total = sum((value * place).sum() for value in values)
        return [*(v.detach() for v in values), torch.autograd.grad(total, hidden)[0]]

    exact, plain = found("eager", torch.float64), found("eager", torch.float32)
    for ours, theirs, truth in zip(found("fused", torch.float32), plain, exact, strict=True):
        bound = 3 * (theirs.double() - truth).norm() + 1e-6 * truth.norm()
        assert (ours.double() - truth).norm() <= bound


def test_draws_under_guidance_are_those_from_all_levels() -> None:
    model, n = awake(torch.float32), 50_003
    generator = torch.Generator("cuda").manual_seed(4)
    place = torch.rand(n, device="cuda", generator=generator) * 2.4 - 1.2
    rows = torch.stack([place, torch.linspace(-9, 9, n, device="cuda")], -1)
    guide = Guide(rows + 0.2 * torch.randn(n, 2, device="cuda", generator=generator), 2.0)
    uniform = torch.rand(n, device="cuda", generator=generator, dtype=torch.float64)
    z = torch.randint(0, 300, (n,), device="cuda", generator=generator).clamp_max(256)
    head = drawing_head(model, (256,))
    drawn, p_z = head.draw(rows, uniform, z, None, guide)
    exact = guide._replace(hidden=guide.hidden.double())
    twin, p_twin = head.draw(rows.double(), uniform, z, None, exact)
    model.kernels = False
    _, p_plain = head.draw(rows, uniform, z, None, guide)
    assert (drawn == twin).double().mean() > 0.99 and (drawn - twin).abs().max() <= 1
    assert (p_z - p_twin).norm() <= 3 * (p_plain - p_twin).norm() + 1e-6 * p_twin.norm()


def test_images_are_sampled_alike_with_and_without_recordings() -> None:
    process, config = Mixed(Vocab(257, 256), k=0.1), SamplerConfig(6, guidance=Guidance(2.0))
    label, drawn = torch.tensor([0, 1, 2, 0]), []
    for replayable in (False, True):
        model = awake(torch.float32).eval()
        model.replayable = replayable
        found = sample(model, process, batch=4, length=768, config=config, seed=1, label=label)
        assert int(found.tokens.max()) < 256
        drawn.append(found.tokens)
    assert (drawn[0] == drawn[1]).double().mean() > 0.99  # rounding may turn a draw


def test_a_compiled_trunk_gives_the_same() -> None:
    model = awake(torch.float32)
    ours = hidden_and_gradients(model)
    compile_trunk(model)
    for name, value in hidden_and_gradients(model).items():
        assert error(value, ours[name]) < 1e-2, name  # convolutions of either may use TF32
