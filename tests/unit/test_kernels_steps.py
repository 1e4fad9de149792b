"""The Triton kernels of a sampler's step without a GPU."""

from __future__ import annotations

import pytest
from interpreting import check_equal, needs_triton

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
@needs_triton
def test_kernels_equal_their_twins_in_the_interpreter() -> None:
    check_equal(SEEN)
