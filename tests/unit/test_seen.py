"""Rows that skip the head since an earlier look at them is enough."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from xdlm import load
from xdlm.models import DiT, DiTConfig, UNet, UNetConfig, drawing_head
from xdlm.noise import Gidd, Masked, Mixed, Uniform
from xdlm.ops import head_logits
from xdlm.ops.doubts import SLACK, Odds
from xdlm.ops.head import DrawingHead
from xdlm.sampling import SamplerConfig, ancestral, sample
from xdlm.sampling.seen import SeenRows, odds_at
from xdlm.sampling.step import is_noise
from xdlm.structs import Vocab

V, MASK, D = 50, 7, 16


def head_of(spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(V, D, generator=generator), torch.randn(V, generator=generator)
    return spread * weight, spread * bias


def bar_at(height: float) -> Odds:
    """Of 200 positions, all in doubt, whose bars are there."""
    b = torch.tensor([height], dtype=torch.float64).exp()
    everywhere = torch.ones(200, dtype=torch.bool)
    return Odds(everywhere, torch.full((200,), 0.5, dtype=torch.float64), torch.ones_like(b), b)


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("moved", [0.0, 0.01, 0.3, 3.0])
def test_the_bound_is_below_the_probability(spread: float, moved: float) -> None:
    """Every row whose probability is below the bar is left in doubt, however far it has moved; and of rows
    that have not, none that is clearly above."""
    weight, bias = head_of(spread)
    seen = SeenRows(DrawingHead(weight, bias, (MASK,)), 200)
    generator = torch.Generator().manual_seed(1)
    at = torch.randperm(200, generator=generator)[:120]
    before = torch.randn(120, D, generator=generator)
    now = before + moved * torch.randn(120, D, generator=generator)
    z = torch.arange(120) % (V - 8) + 8
    logits = [head_logits(hidden, weight, bias, (MASK,)) for hidden in (before, now)]
    p_z = [law.softmax(-1).gather(1, z[:, None])[:, 0] for law in logits]
    rows = torch.arange(120)
    tokens = torch.zeros(200, dtype=torch.int64).scatter_(0, at, z)
    nothing_known, doubts = seen.doubtful(at, before, rows, tokens, bar_at(-600.0))
    assert nothing_known.all()
    torch.testing.assert_close(doubts.logit, logits[0].gather(1, z[:, None])[:, 0])
    seen.remember(at, before, doubts.logit, p_z[0].double())
    for height in torch.linspace(-20, 0, 41):
        doubt, _ = seen.doubtful(at, now, rows, tokens, bar_at(float(height)))
        assert doubt[p_z[1].log() < height].all()
        if not moved:
            assert not doubt[p_z[1].log() > height + 0.02].any()


def test_the_bar_is_where_noise_ends() -> None:
    process = Mixed(Vocab(V, MASK), k=0.1)
    at_t = process.coefs(torch.tensor([0.3, 0.8], dtype=torch.float64))
    z = torch.tensor([[1, 2, 3], [4, 5, 6]])
    accept = torch.tensor([[0.0, 0.3, 0.999], [0.5, 0.1, 0.7]], dtype=torch.float64)
    odds = odds_at(at_t, torch.ones_like(z, dtype=torch.bool), accept)
    height = odds.bar(torch.arange(6)).double().view(2, 3) - SLACK
    rows = (torch.arange(6) // 3, torch.arange(6) % 3)
    for shift, noisy in ((-1e-5, True), (1e-5, False)):
        p_z = (height + shift).exp()[rows].clamp_max(1.0)
        found = is_noise(at_t.index(rows[0]), p_z, z[rows], accept[rows])
        expected = torch.full((6,), noisy)
        expected[0] = True  # a number of zero takes anything for noise
        assert torch.equal(found, expected)
    assert odds._replace(in_doubt=~odds.in_doubt).bar(torch.arange(6)).isinf().all()


@pytest.mark.parametrize(
    "process",
    [Mixed(Vocab(V, MASK), k=0.3), Uniform(Vocab(V)), Gidd(Vocab(V, MASK), p_uniform=0.3)],
    ids=["mixed", "uniform", "gidd"],
)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_texts_are_the_same(process, frozen: bool, dtype: torch.dtype, monkeypatch) -> None:
    """With and without, token by token, and with fewer rows through the head."""
    torch.manual_seed(0)
    model = DiT(DiTConfig(depth=1, width=32, heads=2, cond_width=16), V).eval()
    nn.init.normal_(model.out.weight, std=0.3)
    model.to(dtype)
    args = {"batch": 3, "length": 40, "config": SamplerConfig(steps=24), "seed": 5, "record": True}
    if frozen:
        args |= {"given": torch.full((3, 40), 9), "frozen": torch.rand(3, 40) < 0.3}
    ours = sample(model, process, **args)
    monkeypatch.setattr(ancestral.SeenRows, "of", lambda *_: None)
    twin = sample(model, process, **args)
    assert torch.equal(ours.tokens, twin.tokens)
    for one, other in zip(ours.trajectory.frames, twin.trajectory.frames, strict=True):
        assert torch.equal(one, other)
    assert ours.head_rows < 0.9 * twin.head_rows


@pytest.mark.parametrize("name", ["pocket-xdlm", "pocket-udlm"])
def test_trained_models_look_at_fewer_rows(name: str, monkeypatch) -> None:
    model = load(name)
    args = {"batch": 2, "length": 96, "config": SamplerConfig(steps=24), "seed": 1}
    ours = sample(model.denoiser, model.process, **args)
    monkeypatch.setattr(ancestral.SeenRows, "of", lambda *_: None)
    twin = sample(model.denoiser, model.process, **args)
    assert torch.equal(ours.tokens, twin.tokens)
    assert ours.head_rows < 0.9 * twin.head_rows


def test_nothing_is_remembered_where_it_says_nothing() -> None:
    """A head that is no linear map of its states, and noise that leaves no doubt."""
    unet = UNet(UNetConfig(channels=32, multipliers="1", blocks=1, attention=0), 256)
    assert SeenRows.of(drawing_head(unet, ()), 8) is None
    assert not Masked(Vocab(V, MASK)).has_uniform_noise
