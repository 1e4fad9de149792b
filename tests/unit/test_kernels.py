"""The Triton kernels without a GPU: Triton's interpreter runs them on the CPU, at small sizes.

It runs in a process of its own, since it must be switched on before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import torch
from test_ops import head_inputs, loss_and_grads
from xdlm import Vocab
from xdlm.noise import Mixed
from xdlm.objective import elbo_weight, row_log_c, row_losses
from xdlm.objective.fused_rates import fused_row_losses
from xdlm.ops import Stream, draw_and_weigh, fused_product, rows, uniform
from xdlm.ops.doubts import Doubts, TakenRows
from xdlm.ops.fused import TritonBlock
from xdlm.ops.fused_counter import fused_uniform
from xdlm.ops.fused_order import fused_order
from xdlm.ops.gather import ordered_in_torch
from xdlm.ops.head import DrawingHead
from xdlm.structs import HeadRows

rows.fused_obstacle = lambda *_: None  # pretend that the kernels can run here
torch.manual_seed(0)
TritonBlock.elements = TritonBlock.gradient_elements = 5 * 5000
TritonBlock.least_rows = 1
# A width of 7 is one that the kernel of the product cannot take, and a library does it.
for vocab, mask_id, bias, k, width in [(513, 256, True, 0.1, 8), (5000, 0, False, 0.1, 7),
                                       (4097, 4096, True, 0.0, 8)]:
    process = Mixed(Vocab(vocab, mask_id), k=k)
    hidden, weight, offset, x, z = head_inputs(13, width, vocab, mask_id, torch.float32, bias=bias)
    z = torch.where(z == mask_id, z, x) if k == 0 else z
    expected = loss_and_grads("eager", hidden, weight, offset, x, z, process, 0.4)
    computed = loss_and_grads("fused", hidden, weight, offset, x, z, process, 0.4)
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-5)
    coefs = process.coefs(torch.full(x.shape, 0.4, dtype=torch.float64))
    weights = elbo_weight(coefs, x, z)
    for losses in (row_losses(coefs, x, z, weights), fused_row_losses(coefs, x, z, weights)):
        total = rows.row_loss(HeadRows(hidden, weight, offset, x, z, row_log_c(process, coefs, x)),
                              losses, mask_id=process.special_ids, impl="fused")
        torch.testing.assert_close(total.float(), expected[4].float(), rtol=1e-5, atol=1e-5)
        leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
        for ours, theirs in zip(torch.autograd.grad(total, leaves), expected[5:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-5)
    u = torch.rand(13, dtype=torch.float64)
    u[0], u[1] = 0.0, 1 - 2.0**-53
    with torch.no_grad():
        drawn, p_x = DrawingHead(weight, offset, process.special_ids).draw(hidden, u, x)
        logits = rows.head_logits(hidden, weight, offset, process.special_ids)
    twin, p_twin = draw_and_weigh(logits, u, x)
    assert torch.equal(drawn, twin)
    torch.testing.assert_close(p_x, p_twin, rtol=1e-5, atol=0)
# Logits far from zero, and far from each other: the unit of a draw follows them.
torch.manual_seed(0)
weight, u = torch.randn(700, 4), torch.rand(24, dtype=torch.float64)
hidden = torch.randn(24, 4) * torch.logspace(0, 2, 24)[:, None]
for shift in (-2000.0, -600.0, 700.0, 3000.0):
    offset = torch.full((700,), shift)
    with torch.no_grad():
        drawn, p_x = DrawingHead(weight, offset, (3,)).draw(hidden, u, torch.arange(24))
        logits = rows.head_logits(hidden, weight, offset, (3,))
    twin, p_twin = draw_and_weigh(logits, u, torch.arange(24))
    assert torch.equal(drawn, twin)
    torch.testing.assert_close(p_x, p_twin, rtol=5e-3, atol=1e-300)  # float32 sums near 3000
# States that the kernel of the product cannot take: one row for all, a start off by one number, another
# layout, another precision than the weights'.
for states in (hidden[:1].expand(24, 4), torch.cat([u[:1].float(), hidden.flatten()])[1:].view(24, 4),
               hidden.T.contiguous().T, hidden.bfloat16(), hidden.double()):
    head = DrawingHead(weight, None, (3,))
    assert not head.can_count(states)
    with torch.no_grad():
        drawn, p_x = head.draw(states, u, torch.arange(24))
        twin, p_twin = draw_and_weigh(rows.head_logits(states, weight, None, (3,)), u, torch.arange(24))
    assert torch.equal(drawn, twin)
    torch.testing.assert_close(p_x, p_twin, rtol=1e-4, atol=1e-300)
# Vocabularies within one tile, tiles without ordinary tokens, halves of float32's width.
for vocab, special in ((5, (2,)), (129, ()), (600, tuple(range(256, 512))), (520, tuple(range(256)))):
    for dtype in (torch.float32, torch.float16):
        table, states = torch.randn(vocab, 24).to(dtype), torch.randn(24, 24).to(dtype)
        head, at = DrawingHead(table, None, special), torch.arange(24) % vocab
        with torch.no_grad():
            law = rows.head_logits(states, table, None, special)
            doubts = Doubts(law.gather(1, at[:, None])[:, 0].float(), torch.full((24,), 0.1))
            counted = head.draw_counted(TakenRows(states, at, u, doubts), torch.tensor(24))
            found = head.draw(states, u, at), counted
            twin, p_twin = draw_and_weigh(law, u, at)
        for drawn, p_x in found:
            assert torch.equal(drawn, twin)
            torch.testing.assert_close(p_x, p_twin, rtol=3e-5, atol=0)
# A token far below float32's rounding of what its tile adds up to comes out as often as it should.
offset = torch.zeros(512)
offset[255] = -23.0
law = offset.double().softmax(0)
around = law[:255].sum() + law[255] * torch.arange(-256, 256).double() / 64
head, states = DrawingHead(torch.zeros(512, 8), offset, ()), torch.ones(512, 8)
nothing = torch.zeros(512, dtype=torch.int64)
for drawn, _ in (head.draw(states, around, nothing),
                 head.draw_counted(TakenRows(states, nothing, around, None), torch.tensor(512))):
    assert abs(int((drawn == 255).sum()) - 64) <= 2
    assert (drawn.diff() >= 0).all() and drawn[0] == 254 and drawn[-1] == 256
# A model that gives nothing but NaN: some token, not a place beyond the vocabulary.
with torch.no_grad():
    drawn, _ = DrawingHead(weight, None, (3,)).draw(hidden * torch.nan, u, torch.arange(24))
assert ((drawn >= 0) & (drawn < 700)).all()
# Where nothing is drawn there is a token all the same: whoever looks it up must not read beyond the logits.
torch.use_deterministic_algorithms(True)  # fresh memory holds the largest numbers
with torch.no_grad():
    drawn, _ = DrawingHead(weight, None, (3,)).draw(hidden, -u.sign(), torch.arange(24))
assert not drawn.any()
torch.use_deterministic_algorithms(False)
# c so large that a product of four would overflow; and of two, where 1e18 is taken.
hidden, weight, offset, x, z = head_inputs(6, 8, 513, 256, torch.float32)
for log_c in (22.0, 24.0, 40.0, 90.0):
    at = torch.full((6,), log_c)
    found = []
    for impl, dtype in (("fused", torch.float32), ("eager", torch.float64)):
        leaves = [v.detach().to(dtype).requires_grad_() for v in (hidden, weight, offset)]
        given = at.clamp_max(18 * 2.302585092994046) if impl == "eager" else at
        stats = rows.row_stats(*leaves, x, z, given, mask_id=256, impl=impl)
        found.append([stats.S.double(), *torch.autograd.grad(stats.S.sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 3e-6 * theirs.norm(), (ours - theirs).norm() / theirs.norm()
# Views that a kernel must not take for plain arrays: one row of log c for all, every other token, and
# an upstream gradient that is one number expanded.
process = Mixed(Vocab(513, 256), k=0.1)
hidden, weight, offset, x, z = head_inputs(12, 8, 513, 256, torch.float32)
twice = lambda v: torch.stack([v, v], 1).flatten()[::2]
coefs = process.coefs(torch.tensor([0.4]))
for impl in ("eager", "fused"):
    stats = rows.row_stats(hidden[None], weight, offset, twice(x)[None], twice(z)[None],
                           row_log_c(process, coefs, x[None]), mask_id=256, impl=impl)
    found = [stats.S[0], stats.logit_x[0], *torch.autograd.grad(stats.lse.sum(), (hidden, weight))]
    if impl == "eager":
        expected = found
for ours, theirs in zip(found, expected, strict=True):
    torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-5)
# More rows and tokens than a program takes at a time: those of the second tile, and the bias's sums.
hidden, weight, offset, x, z = head_inputs(70, 8, 2500, 7, torch.float32)
process = Mixed(Vocab(2500, 7), k=0.1)
at = row_log_c(process, process.coefs(torch.tensor([0.4])), x[None])[0]
TritonBlock.elements = TritonBlock.gradient_elements = 50 * 2500
TritonBlock.least_rows = 1
found = []
for impl in ("fused", "eager"):
    leaves = [v.detach().requires_grad_() for v in (hidden, weight, offset)]
    stats = rows.row_stats(*leaves, x, z, at, mask_id=7, impl=impl)
    total = (stats.S.double() * 1e-3 + stats.lse - stats.logit_x).sum()
    found.append(torch.autograd.grad(total, leaves))
for ours, theirs in zip(*found, strict=True):
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
for n in (1, 5, 4096, 9000):
    for share in (0.0, 0.3, 1.0):
        mask = torch.rand(n) < share
        for ours, theirs in zip(fused_order(mask), ordered_in_torch(mask), strict=True):
            assert torch.equal(ours, theirs)
sample, position = torch.arange(9)[:, None] + (1 << 33), torch.arange(70)[None]
for one, other in [(sample, position), (sample[:, 0], sample[:, 0] % 7), (sample[0, 0], position[0, 3]),
                   (position.expand(9, 70).T, sample.T % 5 + position.T), (sample[:, :, None], position)]:
    here = uniform(2**40 + 5, Stream.NOISE, one, other, 7)
    assert torch.equal(here, fused_uniform(2**40 + 5, int(Stream.NOISE), one, other, 7))
print("equal")
"""


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
NOISE = """
import torch
from processes import PROCESSES, N, ordinary_tokens
from xdlm.ops.fused_noise import fused_noised
from xdlm.training.noised import noised_in_torch

for process in PROCESSES.values():
    for kept_rows in (1.0, 0.02):
        torch.manual_seed(0)
        known = torch.tensor(ordinary_tokens(process))
        x = known[torch.randint(0, len(known), (300, 5))].T
        index, seed = torch.arange(5) + (1 << 33), 2**35 + 3
        coefs = process.coefs(torch.rand(5, dtype=torch.float64) * 0.99 + 0.005)
        expected = noised_in_torch(process, coefs, x, index, seed, kept_rows)
        computed = fused_noised(coefs, N, x, index, seed, kept_rows)
        assert torch.equal(computed.z, expected.z) and torch.equal(computed.picked, expected.picked)
        torch.testing.assert_close(computed.weight, expected.weight, rtol=1e-12, atol=0)
        torch.testing.assert_close(computed.scale, expected.scale, rtol=1e-12, atol=0)
print("equal")
"""


#: Rows that an earlier look settles, and the rest of them counted where the GPU would be.
SEEN = """
import pytest
import torch
from xdlm import Vocab
from xdlm.models import DiT, DiTConfig
from xdlm.noise import Masked, Mixed, Uniform
from xdlm.ops import draw_and_weigh, fused_product, head_logits, rows
from xdlm.ops.fused_product import product_with_sums
from xdlm.ops.doubts import Doubts, Odds, TakenRows
from xdlm.ops.fused_seen import Memory, fused_doubts, fused_settle, fused_take
from xdlm.ops.gather import PickedRows, ordered_in_torch, padded
from xdlm.ops.head import DrawingHead
from xdlm.sampling import Filter, SamplerConfig, sample

torch.manual_seed(0)
hidden, before, weight = (torch.randn(n, 21) for n in (40, 60, 50))
chosen, at, z = torch.randperm(40)[:30], torch.randperm(60)[:30], torch.randint(0, 50, (30,))
log_total, radius = torch.randn(60), torch.tensor(0.01)
tokens = torch.zeros(60, dtype=torch.int64).scatter_(0, at, z)
# Five sequences of twelve, at times of their own, and at one for all; some tokens are noise for sure.
accept, own = torch.rand(60, dtype=torch.float64), torch.rand(2, 5, dtype=torch.float64)
shared = own[:, :1].expand(2, 5)
for bias in (None, torch.randn(50)):
    for alpha, b in (own, shared):
        odds = Odds(torch.arange(60) % 4 > 0, accept, alpha, b)
        doubtful, (logit, bar) = fused_doubts(hidden, chosen, at, Memory(before, log_total), weight, bias,
                                              radius, tokens, odds)
        sure, expected = ~odds.in_doubt[at], (hidden[chosen] * weight[z]).sum(-1)
        expected += 0 if bias is None else bias[z]
        torch.testing.assert_close(logit[~sure], expected[~sure])
        torch.testing.assert_close(bar, odds.bar(at))
        assert bar[sure].isinf().all() and doubtful[sure].all() and 0 < sure.sum() < 30
        assert (logit[sure] == -torch.inf).all()
        moved = (hidden[chosen] - before[at]).norm(dim=-1)
        assert torch.equal(doubtful, (expected - log_total[at] - 0.01 * moved < bar) | sure)
        assert sure.sum() < doubtful.sum() < 30
log_total[at[:4]] = torch.inf
doubtful, doubts = fused_doubts(hidden, chosen, at, Memory(before, log_total), weight, bias, radius, tokens,
                                odds)
assert doubtful[:4].all()

u = torch.rand(60, dtype=torch.float64) - 0.3
for which, count, alpha, b in ((torch.randperm(30), 20, *own), (torch.randperm(30), 20, *shared),
                               (None, 30, *own)):
    odds, n = odds._replace(alpha=alpha, b=b), torch.tensor(count)
    row = (torch.arange(30) if which is None else which)[:count]
    there = at[row]
    for given in (doubts, None):
        taken = fused_take(hidden, chosen, at, which, n, u, given)
        assert torch.equal(taken.at[:count], there) and torch.equal(taken.uniform[:count], u[there])
        assert torch.equal(taken.hidden[:count], hidden[chosen[row]])
        if given is not None:
            assert torch.equal(taken.doubts.logit[:count], doubts.logit[row])
            assert torch.equal(taken.doubts.bar[:count], doubts.bar[row])
        p_z = torch.rand(30, dtype=torch.float64)
        drawn, other = torch.arange(30) + 100, torch.arange(60) + 200
        noisy = torch.ones(count, dtype=torch.bool)
        known, totals = before.clone(), log_total.clone()
        if given is not None:
            f = alpha[there // 12] * p_z[:count] + b[there // 12]
            unsure = odds.in_doubt[there]
            noisy = (accept[there] * f < b[there // 12]) | ~unsure
            known[there[unsure]] = hidden[chosen[row[unsure]]]
            totals[there[unsure]] = doubts.logit[row[unsure]] - p_z[:count][unsure].log().float()
        expected = tokens.clone()
        expected[there[noisy]] = torch.where(u[there] >= 0, drawn[:count], other[there])[noisy]
        state, memory = tokens.clone(), Memory(before.clone(), log_total.clone())
        fused_settle(taken, n, drawn, p_z, given and odds, other, state, given and memory)
        assert torch.equal(state, expected) and torch.equal(memory.hidden, known)
        torch.testing.assert_close(memory.log_total, totals)
        assert 0 < (state != tokens).sum() and (given is None or (~noisy).any())

obstacle, rows.fused_obstacle = rows.fused_obstacle, lambda *_: None
weight, bias, u = torch.randn(300, 72), torch.randn(300), torch.rand(40, dtype=torch.float64)
hidden, z = torch.randn(40, 72), torch.randint(0, 299, (40,))
twin = draw_and_weigh(head_logits(hidden, weight, bias, (299,)), u, z)
head = DrawingHead(weight, bias, (299,))
assert head.can_count(hidden) and not head.can_count(hidden[:, :71].contiguous())
assert not head.can_count(hidden.double())
for count in (0, 5, 20, 31, 40):
    bar = torch.where(torch.arange(40) % 3 > 0, 0.01, twin[1].log() - 0.01).float()
    logit = head_logits(hidden, weight, bias, (299,)).gather(1, z[:, None])[:, 0]
    taken = TakenRows(hidden, z, u, Doubts(logit, bar))
    drawn, p_z = head.draw_counted(taken, torch.tensor(count))
    assert len(drawn) == len(p_z) == 40
    expected = torch.where(torch.arange(40) % 3 > 0, twin[0], 0)
    assert torch.equal(drawn[:count], expected[:count])
    torch.testing.assert_close(p_z[:count], twin[1][:count], rtol=1e-5, atol=0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(head, "elements", 4 * 2 * 6 * 7)  # of seven rows, two sums each of six parts
        patched.setattr(fused_product, "product_with_sums", lambda states, *more: (
            product_with_sums(states, *more) if len(states) <= 7 else None))
        parts = head.draw_counted(taken, torch.tensor(count))
    assert torch.equal(parts[0][:count], drawn[:count])
    torch.testing.assert_close(parts[1][:count], p_z[:count], rtol=1e-5, atol=0)
    # Of noise for sure, with doubts about others or without; far from zero, where a unit's power overflows.
    sure = Doubts(torch.full((40,), -torch.inf), torch.full((40,), torch.inf))
    for shift, given in ((0, None), (0, sure), (-709.5, sure), (-3548.6, sure)):
        far = DrawingHead(weight, bias + shift, (299,))
        surely = far.draw_counted(taken._replace(doubts=given), torch.tensor(count))[0]
        assert (surely == twin[0])[:count].float().mean() >= (1 if not shift else 0.9) or not count
assert len(head.draw_counted(taken.part(slice(0, 0)), torch.tensor(0))[0]) == 0
# Tokens that are noise by a hair are drawn for, though p(z) may reach a bar that is rounded.
odds = Odds(torch.ones(40, dtype=torch.bool), torch.full_like(u, 0.5 - 1e-10), torch.ones_like(u), twin[1])
assert (odds.accept * (twin[1] + odds.b) < odds.b).all()
taken = taken._replace(doubts=Doubts(logit, odds.bar(torch.arange(40))))
assert torch.equal(head.draw_counted(taken, torch.tensor(40))[0], twin[0])

# What nobody wrote must not come through: fresh memory holds the largest numbers, and no number.
torch.use_deterministic_algorithms(True)
# As on a GPU, where positions that were not asked for fill up what is gathered.
def order(self):
    places, count = ordered_in_torch(self._mask)
    return padded(places, int(count), 16), int(count)
PickedRows.order = order
for process in (Masked(Vocab(60, 7)), Mixed(Vocab(60, 7), k=0.3), Uniform(Vocab(60))):
    model = DiT(DiTConfig(depth=1, width=32, heads=2, cond_width=16), 60).eval()
    torch.nn.init.normal_(model.out.weight, std=0.3)
    few, nearly = dict(steps=4), dict(given=torch.randint(8, 59, (8, 3)), frozen=torch.rand(8, 3) < 0.4)
    # Few positions, so that parts of the batch have nothing to do; filters; and what is recorded.
    for runs, config, more in ((2, dict(steps=6), {}), (8, dict(steps=12), nearly),
                               (8, few | dict(filter=Filter(0.3)), {}), (8, few, dict(record=True))):
        args = dict(batch=runs, length=9 if runs == 2 else 3, config=SamplerConfig(**config), seed=5)
        found = []
        for there in (lambda *_: None, obstacle):
            rows.fused_obstacle = there
            found.append(sample(model, process, **args, **more))
        ours, theirs = found
        assert torch.equal(ours.tokens, theirs.tokens) and ours.head_rows == theirs.head_rows
        if more.get("record"):
            for one, other in zip(ours.trajectory.probs, theirs.trajectory.probs, strict=True):
                torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=0)
# States of another precision than the head's weight, whose sums no kernel takes.
model.double()
model.trunk, trunk = (lambda *more: trunk(*more).float()), model.trunk
model.replayable = False
found = []
for there in (lambda *_: None, obstacle):
    rows.fused_obstacle = there
    found.append(sample(model, process, **args).tokens)
assert torch.equal(*found)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    "script", [SCRIPT, TRUNK, UNET, NOISE, SEEN], ids=["head", "trunk", "unet", "noise", "seen"]
)
def test_kernels_equal_their_twins_in_the_interpreter(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
