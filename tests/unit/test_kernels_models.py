"""The Triton kernels of the models without a GPU."""

from __future__ import annotations

import pytest
from interpreting import check_equal, needs_triton

TRUNK = """
import torch
from xdlm.models import DiT, DiTConfig, dit
from xdlm.models.layers import Branch
from xdlm.ops.fused_norm import fused_adaptive_norm

dit.kernels_can_run = lambda h: True
more = {"time_conditioning": True, "n_classes": 3, "mlp_ratio": 3}
for changes, causal in (({}, False), (more, False), ({}, True)):
    config = DiTConfig(depth=2, width=48, heads=3, cond_width=16, dropout=0.0, **changes)
    torch.manual_seed(0)
    model = DiT(config, 20, causal=causal).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    z, t = torch.randint(0, 20, (3, 13)), torch.rand(3)
    found = []
    for kernels in (False, True):
        model.kernels = kernels
        model.zero_grad()
        hidden = model.trunk(z, t)
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([hidden.detach(), *gradients])
    with torch.no_grad():  # in place
        assert (model.trunk(z, t) - found[0][0]).norm() <= 2e-5 * found[0][0].norm()
        if causal:
            torch.testing.assert_close(model.trunk(z[:, :7], t), model.trunk(z, t)[:, :7])
    assert len(found[0]) == len(found[1])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm()
    rows = torch.tensor([30, 2, 7, 38, 12])  # the last block finished there alone, with kernels and without
    expected, found = found[0][0].flatten(0, 1)[rows], []
    for kernels in (False, True):
        model.kernels = kernels
        model.zero_grad()
        some = model.finish(model.body(z, t), rows)
        (some * torch.linspace(-1, 1, some.numel()).view_as(some)).sum().backward()
        assert (some - expected).norm() <= 2e-5 * expected.norm()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        with torch.no_grad():
            assert (model.finish(model.body(z, t), rows) - expected).norm() <= 2e-5 * expected.norm()
            assert model.finish(model.body(z, t), rows[:0]).shape == (0, 48)
        model.zero_grad()
        model.finish(model.body(z, t), rows[:0]).sum().backward()  # no row: nothing but zeros
        assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm()
# Dropout: the share, the scale, the same places in the backward pass.
torch.manual_seed(1)
value, one = torch.ones(2, 16, 96, requires_grad=True), torch.ones(1, 96)
branch = Branch(value, None, one, 0.25, torch.tensor([7], dtype=torch.int32))
after, _ = fused_adaptive_norm(
    torch.zeros(2, 16, 96), one[0], 0 * one, 0 * one, branch=branch
)
assert abs((after == 0).double().mean() - 0.25) < 5 * (0.25 * 0.75 / after.numel()) ** 0.5
assert torch.equal(torch.autograd.grad(after.sum(), value)[0], after.detach())
assert after.max() == torch.tensor(4 / 3)
print("equal")
"""

UNET = """
import torch
from torch.nn import functional as F
from xdlm.models import UNet, UNetConfig, drawing_head, head_stats, unet
from xdlm.ops.fused_group_norm import fused_group_norm
from xdlm.ops.head import Guide

# Odd sizes, tiles that are not full, groups of one and of all; far from zero, where sums of squares fail.
torch.manual_seed(0)
for n, c, side, groups, swish, shifted in [
    (2, 8, 5, 2, True, True), (3, 96, 12, 24, True, False), (1, 6, 3, 1, False, True),
    (1, 192, 9, 32, True, True), (2, 5, 2, 5, True, True),
]:
    x, up = torch.randn(n, c, side, side) + 100, torch.randn(n, c, side, side)
    leaves = [x, torch.randn(c), torch.randn(c), torch.randn(n, c)]
    leaves = [v.requires_grad_() for v in (leaves if shifted else leaves[:3])]

    def plain(x, weight, bias, shift=None):
        h = F.group_norm(x if shift is None else x + shift[..., None, None], groups, weight, bias)
        return F.silu(h) if swish else h

    def fused(x, weight, bias, shift=None):
        return fused_group_norm(x, weight, bias, groups, shift=shift, swish=swish)

    def values(function, leaves):
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad((y * up.to(y)).sum(), leaves)]

    exact = values(plain, [v.detach().double().requires_grad_() for v in leaves])
    for ours, theirs, truth in zip(values(fused, leaves), values(plain, leaves), exact, strict=True):
        bound = 3 * (theirs.double() - truth).norm() + 2e-6 * truth.norm()
        assert (ours.double() - truth).norm() <= bound
# The head: wide and narrow laws, levels at the ends, masks, with and without the sum over levels.
model = UNet(UNetConfig(side=8, channels=8, multipliers="1", attention=0), 257)
for n, summed in ((203, True), (7, False)):
    x, z = torch.randint(0, 256, (n,)), torch.randint(0, 300, (n,)).clamp_max(256)
    x[:3] = torch.tensor([0, 255, 0])
    log_c, up = torch.linspace(-6, 12, n, dtype=torch.float64) if summed else None, torch.randn(3, n)
    rows = torch.stack([torch.rand(n) * 2.4 - 1.2, torch.linspace(-9, 9, n)], -1)

    def head(impl, dtype):
        unet.kernels_can_run = lambda h: impl == "fused"
        hidden = rows.to(dtype).requires_grad_()
        stats = head_stats(model, hidden, x, z, log_c, mask_id=256, impl=impl)
        log_z = torch.where(z < 256, stats.logit_z - stats.lse, 0.0)
        values = [stats.logit_x - stats.lse, log_z, stats.S]
        total = sum((value * part).sum() for value, part in zip(values, up, strict=True))
        return [*(v.detach().double() for v in values), torch.autograd.grad(total, hidden)[0].double()]

    exact, plain = head("eager", torch.float64), head("eager", torch.float32)
    for ours, theirs, truth in zip(head("fused", torch.float32), plain, exact, strict=True):
        assert (ours - truth).norm() <= 3 * (theirs - truth).norm() + 3e-7 * truth.norm()
# Draws under guidance, towards the label and past it: any widths, some that were not asked for, masks.
n = 403
rows = torch.stack([torch.rand(n) * 2.4 - 1.2, torch.linspace(-9, 9, n)], -1)
guide_rows = rows + torch.randn(n, 2) * torch.tensor([0.1, 0.5])
u, z = torch.rand(n, dtype=torch.float64), torch.randint(0, 300, (n,)).clamp_max(256)
u[:3] = torch.tensor([0.0, 1 - 2.0**-53, -1.0])
drawn_by = drawing_head(model, (256,))
for scale in (2.0, 0.5):
    unet.kernels_can_run = lambda h: True
    ours = drawn_by.draw(rows, u, z, None, Guide(guide_rows, scale))
    unet.kernels_can_run = lambda h: False
    twin = drawn_by.draw(rows.double(), u, z, None, Guide(guide_rows.double(), scale))
    wanted = u >= 0
    assert (ours[0] == twin[0])[wanted].double().mean() > 0.99  # float32 may turn a draw
    assert ours[0].min() >= 0 and (ours[0] - twin[0])[wanted].abs().max() <= 1
    torch.testing.assert_close(ours[1], twin[1], rtol=1e-4, atol=1e-9)
    assert bool((ours[1][z == 256] == 0).all())
assert len(drawn_by.draw(rows[:0], u[:0], z[:0], None, Guide(rows[:0], 2.0))[0]) == 0
# The whole trunk.
config = UNetConfig(side=8, channels=8, multipliers="1-2", blocks=1, attention=4, dropout=0.0,
                    n_classes=3)
model = UNet(config, 257).train()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
z, t, label = torch.randint(0, 257, (2, 192)), torch.rand(2), torch.tensor([2, -1])
found = []
for kernels in (False, True):
    unet.kernels_can_run = lambda h: kernels
    model.zero_grad()
    hidden = model.trunk(z, t, label)
    assert hidden.shape == (2, 192, 2)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    found.append([hidden.detach(), *(p.grad.clone() for p in model.parameters())])
for ours, theirs in zip(*found, strict=True):
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
print("equal")
"""


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("script", [TRUNK, UNET], ids=["trunk", "unet"])
def test_kernels_equal_their_twins_in_the_interpreter(script: str) -> None:
    check_equal(script)
