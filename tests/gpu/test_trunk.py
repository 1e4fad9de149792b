"""The trunk's kernels against the same trunk in plain torch, on a GPU."""

from __future__ import annotations

import pytest
import torch

from xdlm.models import DiT, DiTConfig
from xdlm.models.layers import Branch
from xdlm.ops.fused_norm import fused_adaptive_norm
from xdlm.training.device import compile_trunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def awake(dtype: torch.dtype, **changes: object) -> DiT:
    """A DiT whose zero-initialised parts have been shaken, so that everything matters."""
    config = DiTConfig(depth=3, width=192, heads=3, cond_width=24, dropout=0.0, **changes)
    torch.manual_seed(0)
    model = DiT(config, 50)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to("cuda", dtype).train()


def hidden_and_gradients(model: DiT, length: int = 77) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    z = torch.randint(0, 50, (5, length), device="cuda", generator=generator)
    t = torch.rand(5, device="cuda", generator=generator)
    label = torch.arange(5, device="cuda") % 3 - 1 if model.config.n_classes else None
    model.zero_grad()
    hidden = model.trunk(z, t, label)
    weight = torch.randn(hidden.shape, device="cuda", generator=generator)
    (hidden * weight).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach(), **gradients}


def error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("changes", [
    {}, {"time_conditioning": True}, {"time_conditioning": True, "n_classes": 3}, {"mlp_ratio": 3},
], ids=["plain", "time", "classes", "narrow"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kernels_are_as_exact_as_plain_torch(dtype, changes) -> None:
    truth_model = awake(dtype, **changes).double()
    model = awake(dtype, **changes)
    truth = hidden_and_gradients(truth_model)
    ours = hidden_and_gradients(model)
    model.kernels = False
    plain = hidden_and_gradients(model)
    assert ours.keys() == plain.keys() == truth.keys()
    for name, exact in truth.items():
        assert error(ours[name], exact) <= 2 * error(plain[name], exact) + 1e-6, name


@pytest.mark.parametrize("shape", [(3, 100), (1, 1), (1, 300), (7, 1)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_no_gradient_gives_the_same_hidden_states(dtype, tolerance: float, shape) -> None:
    """Two ways of rounding to one precision: in bfloat16 they were seen 1.4e-2 apart."""
    model = awake(dtype)
    z, t = torch.randint(0, 50, shape, device="cuda"), torch.rand(shape[0], device="cuda")
    with_gradient = model.trunk(z, t).detach()
    with torch.no_grad():
        without = model.trunk(z, t)
        model.kernels = False
        plain = model.trunk(z, t)
    assert error(without, with_gradient) < tolerance
    assert error(without, plain) < tolerance


def test_autocast_and_adapters_keep_to_plain_torch() -> None:
    """A layer that is wrapped or hooked is called as it is; autocast decides about types itself."""
    model = awake(torch.float32)
    z, t = torch.randint(0, 50, (2, 9), device="cuda"), torch.rand(2, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        hidden = model.trunk(z, t)
    hidden.float().sum().backward()
    seen = []
    model.blocks[0].mlp_out.register_forward_hook(lambda *_: seen.append(1))
    model.trunk(z, t)
    assert seen == [1]


def test_a_compiled_trunk_has_the_same_gradients() -> None:
    """A fusion of the compiler that is switched off would fill some of them with garbage."""
    model = awake(torch.float32)
    expected = hidden_and_gradients(model, length=1024)
    compile_trunk(model)
    for _ in range(2):
        for name, value in hidden_and_gradients(model, length=1024).items():
            assert error(value, expected[name]) < 1e-4, name


def test_dropout() -> None:
    """The share and the scale are right, for every token and every feature; the seed decides; and the
    backward pass removes what the forward pass did."""
    shape, p = (8, 512, 384), 0.1
    nothing = torch.zeros(1, 384, device="cuda")
    branch = torch.ones(shape, device="cuda", requires_grad=True)

    def dropped(seed: int) -> torch.Tensor:
        drop_by = torch.tensor([seed], dtype=torch.int32, device="cuda")
        return fused_adaptive_norm(
            torch.zeros(shape, device="cuda"), nothing[0] + 1, nothing, nothing,
            branch=Branch(branch, None, nothing + 1, p, drop_by),
        )[0]  # fmt: skip

    first = dropped(0)
    assert torch.equal(first, dropped(0))
    assert first.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
    (gradient,) = torch.autograd.grad(first.sum(), branch)
    assert torch.equal(gradient, first.detach())
    gone, other = (first == 0).double(), (dropped(1) == 0).double()
    for share, n in (
        (gone.mean(), gone.numel()),
        (gone.mean((0, 1)), 8 * 512),
        (gone.mean(2), 384),
    ):
        assert ((share - p).abs() < 5.5 * (p * (1 - p) / n) ** 0.5).all()
    # Neighbours, and other seeds, have nothing to do with each other.
    for a, b in ((gone[..., 1:], gone[..., :-1]), (gone[:, 1:], gone[:, :-1]), (gone, other)):
        assert abs((a * b).mean() - p * p) < 5 * p / a.numel() ** 0.5
