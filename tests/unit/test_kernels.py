"""The Triton kernels of the head, of draws and of noise without a GPU."""

from __future__ import annotations

import pytest
from interpreting import check_equal, needs_triton

HEAD = """
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


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("script", [HEAD, NOISE], ids=["head", "noise"])
def test_kernels_equal_their_twins_in_the_interpreter(script: str) -> None:
    check_equal(script)
