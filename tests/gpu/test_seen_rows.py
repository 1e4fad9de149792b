"""Rows that skip the head, on a GPU."""

from __future__ import annotations

import pytest
import torch

from xdlm import Vocab
from xdlm.models import DiT, DiTConfig
from xdlm.noise import Mixed, Uniform
from xdlm.ops.doubts import Doubts, Odds, TakenRows
from xdlm.ops.fused_seen import Memory, fused_doubts
from xdlm.ops.head import DrawingHead
from xdlm.sampling import SamplerConfig, ancestral, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, before, weight = (
        torch.randn(n, 77, device="cuda", dtype=dtype) for n in (400, 600, 500)
    )
    rows, at = (torch.randperm(n, device="cuda")[:300] for n in (400, 600))
    z = torch.randint(0, 500, (600,), device="cuda")
    log_total, radius = torch.randn(600, device="cuda") * 10, torch.tensor(0.3, device="cuda")
    accept, chances = (torch.rand(n, device="cuda", dtype=torch.float64) for n in (600, 6))
    odds = Odds(torch.arange(600, device="cuda") % 5 > 0, accept, *chances.view(2, 3))
    doubtful, (logit, bar) = fused_doubts(
        hidden, rows, at, Memory(before, log_total), weight, None, radius, z, odds
    )
    now, unsure = hidden[rows].float(), odds.in_doubt[at]
    expected = (now * weight[z[at]].float()).sum(-1)
    torch.testing.assert_close(logit[unsure], expected[unsure], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(bar, odds.bar(at))
    moved = (now - before[at].float()).norm(dim=-1)
    margin = expected - log_total[at] - 0.3 * moved - bar
    clear = margin.abs() > 1e-3
    assert torch.equal(doubtful[clear], (margin < 0)[clear])
    assert 0 < (~unsure).sum() < doubtful.sum() < 300


@pytest.mark.parametrize("vocab", [1000, 50258])
@pytest.mark.parametrize("kind", ["mixed", "uniform"])
def test_texts_are_the_same(vocab: int, kind: str, monkeypatch) -> None:
    process = Mixed(Vocab(vocab, 3), k=0.1) if kind == "mixed" else Uniform(Vocab(vocab))
    torch.manual_seed(0)
    model = DiT(DiTConfig(depth=2, width=128, heads=2), vocab).to("cuda", torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    args = {"batch": 4, "length": 256, "config": SamplerConfig(steps=32), "seed": 3}
    ours = sample(model, process, **args)
    monkeypatch.setattr(ancestral.SeenRows, "of", lambda *_: None)
    monkeypatch.setattr(ancestral, "can_settle", lambda *_: False)
    twin = sample(model, process, **args)
    assert torch.equal(ours.tokens, twin.tokens)
    assert ours.head_rows < 0.7 * twin.head_rows


@pytest.mark.parametrize("count", [0, 100, 700, 1100, 2000])
def test_rows_that_the_gpu_counts(count: int) -> None:
    """The first `count` of 2,000 rows as they are without counting; where they need not be drawn, not."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    head = DrawingHead(normal(50258, 96) * 0.2, None, (50257,))
    hidden, z = normal(2000, 96), torch.arange(2000, device="cuda")
    uniform = torch.rand(2000, generator=generator, device="cuda", dtype=torch.float64)
    twin = head.draw(hidden, uniform, z)
    needed = torch.arange(2000, device="cuda") % 2 == 0
    bar = torch.where(needed, 0.01, twin[1].log() - 0.01).float()
    logit = (hidden.float() * head.plain.weight[z].float()).sum(-1)
    taken = TakenRows(hidden, z, uniform, Doubts(logit, bar))
    drawn, p_z = head.draw_counted(taken, torch.tensor(count, device="cuda"))
    torch.testing.assert_close(p_z[:count], twin[1][:count], rtol=1e-4, atol=0)
    assert not drawn[:count][~needed[:count]].any()
    same = (drawn == twin[0])[:count][needed[:count]]
    assert (
        same.float().mean() > 0.995 or not count
    )  # logits that are computed twice round differently


def test_rare_tokens_come_out_as_often_as_they_should() -> None:
    """The last token of a tile has a probability far below float32's rounding of what the tile adds up to:
    of numbers that lie close together around its place, as many give it as its probability says."""
    bias = torch.zeros(512, device="cuda", dtype=torch.bfloat16)
    bias[255] = -23.0
    head = DrawingHead(bias.new_zeros(512, 64), bias, ())
    law = bias.double().softmax(0)
    around = law[:255].sum() + law[255] * torch.arange(-256, 256, device="cuda").double() / 64
    drawn, _ = head.draw(bias.new_ones(512, 64), around, torch.zeros_like(around).long())
    assert abs(int((drawn == 255).sum()) - 64) <= 2
    assert (drawn.diff() >= 0).all() and drawn[0] == 254 and drawn[-1] == 256
