"""Guidance by labels: the law that it promises, in both samplers, from one pass for both branches."""

from __future__ import annotations

import pytest
import torch
from test_sampling import Oracle, frequencies_match
from test_unet import PROCESSES as PIXEL_PROCESSES
from test_unet import small
from torch import Tensor

from xdlm.errors import UserError
from xdlm.models import DiT, DiTConfig, drawing_head
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform
from xdlm.ops.head import Guide, guided
from xdlm.sampling import Guidance, SamplerConfig, sample
from xdlm.structs import Vocab

N, MASK = 7, 3
VOCAB = Vocab(N, MASK)
PROCESSES: list[NoiseProcess] = [Masked(VOCAB), Uniform(Vocab(N)), Mixed(VOCAB, k=0.4), Gidd(VOCAB)]


class Labelled(Oracle):
    """Says `with_label` where there is a label, `without` where there is none."""

    n_classes = 2

    def __init__(self, with_label: Tensor, without: Tensor) -> None:
        super().__init__(None, N)
        self.laws, self.batches = torch.stack([without, with_label]), []

    def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        self.batches.append(len(z))
        if label is None:
            label = torch.full((len(z),), -1)
        return self.laws[(label >= 0).long()][:, None].expand(-1, z.shape[1], -1)


def oracle() -> Labelled:
    generator = torch.Generator().manual_seed(4)
    return Labelled(torch.randn(N, generator=generator), torch.randn(N, generator=generator))


def guided_law(model: Labelled, process: NoiseProcess, scale: float) -> Tensor:
    special = torch.tensor(process.special_ids, dtype=torch.int64)
    without, with_label = (
        law.double().index_fill(0, special, -torch.inf).log_softmax(0) for law in model.laws
    )
    law = scale * with_label + (1 - scale) * without
    return law.index_fill(0, special, -torch.inf).softmax(0)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("impl", ["thinned", "dense", "gumbel", "starved"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 2.0])
def test_samples_follow_the_guided_law(process: NoiseProcess, impl: str, scale: float) -> None:
    model = oracle()
    drawn = sample(
        model, process, batch=20, length=250, label=torch.ones(20, dtype=torch.int64),
        config=SamplerConfig(steps=3, impl=impl, guidance=Guidance(scale)), seed=2,
    )  # fmt: skip
    assert frequencies_match(drawn.tokens, guided_law(model, process, scale))


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 2.0])
def test_what_is_impossible_under_guidance(scale: float) -> None:
    """A token that neither branch allows, one that is ruled out by the label, and one by its absence."""
    never = -torch.inf
    with_it, without = torch.tensor([[0.0, never, never, 1.0], [1.0, never, 0.5, never]])
    law = guided(with_it, without, scale)
    assert law[0] == 1 - scale and law[1] == never
    assert law[2] == (0.5 if scale == 0 else never) and law[3] == 1


def test_both_branches_take_one_pass() -> None:
    model, label = oracle(), torch.tensor([0, 1, 1])
    config = SamplerConfig(steps=4, guidance=Guidance(2.0))
    drawn = sample(model, Mixed(VOCAB, k=0.4), batch=3, length=200, label=label, config=config)
    assert model.batches == [6] * 5 and drawn.nfe.tolist() == [10] * 3
    plain = oracle()
    drawn = sample(plain, Mixed(VOCAB, k=0.4), batch=3, length=200, label=label,
                   config=SamplerConfig(steps=4))  # fmt: skip
    assert plain.batches == [3] * 5 and drawn.nfe.tolist() == [5] * 3


def test_scale_one_is_off_to_the_bit() -> None:
    torch.manual_seed(0)
    model = DiT(DiTConfig(depth=1, width=16, heads=2, cond_width=8, n_classes=2), N).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    args = {"batch": 4, "length": 30, "label": torch.tensor([0, 1, 0, 1]), "seed": 3}
    process = Mixed(VOCAB, k=0.4)
    tokens = {
        scale: sample(
            model, process, config=SamplerConfig(steps=5, guidance=Guidance(scale)), **args
        ).tokens
        for scale in (1.0, 1.0 + 1e-9, 4.0)
    }
    plain = sample(model, process, config=SamplerConfig(steps=5), **args).tokens
    assert torch.equal(tokens[1.0], plain)
    assert torch.equal(tokens[1.0 + 1e-9], plain)  # by way of both branches
    assert not torch.equal(tokens[4.0], plain)


def test_schedules_lead_from_one_scale_to_the_other() -> None:
    times = (1.0, 0.5, 0.0)
    scales = {name: [Guidance(3.0, name).at(t) for t in times] for name in
              ("constant", "rising", "falling", "middle")}  # fmt: skip
    assert scales == {
        "constant": [3, 3, 3], "rising": [1, 2, 3], "falling": [3, 2, 1], "middle": [1, 3, 1],
    }  # fmt: skip
    model = oracle()
    config = SamplerConfig(steps=2, guidance=Guidance(2.0, "rising"))
    label = torch.tensor([0, 1])
    drawn = sample(model, Mixed(VOCAB, k=0.4), batch=2, length=300, label=label, config=config)
    assert model.batches == [2, 4, 4] and drawn.nfe.tolist() == [5, 5]


@pytest.mark.parametrize("process", PIXEL_PROCESSES, ids=lambda p: type(p).__name__)
def test_a_head_that_is_not_linear_is_guided_too(process: NoiseProcess) -> None:
    model, generator = small(process.vocab.size).eval(), torch.Generator().manual_seed(0)
    hidden, unlabelled = torch.randn(2, 300, 2, generator=generator).unbind()
    u, z = torch.rand(300, generator=generator), torch.randint(0, 256, (300,), generator=generator)
    head = drawing_head(model, process.special_ids)
    drawn, p_z = head.draw(hidden, u, z, None, Guide(unlabelled, 2.0))
    log_p = 2 * model.head(hidden)[:, :256].double() - model.head(unlabelled)[:, :256].double()
    law = log_p.softmax(-1)
    torch.testing.assert_close(p_z, law.gather(1, z[:, None])[:, 0], rtol=1e-4, atol=1e-9)
    above = law.cumsum(-1).gather(1, drawn[:, None])[:, 0]
    below = above - law.gather(1, drawn[:, None])[:, 0]
    assert bool(((below - 1e-5 <= u) & (u <= above + 1e-5)).all())


def test_an_image_is_led_by_its_label() -> None:
    process, label = PIXEL_PROCESSES[2], torch.tensor([0, 2])
    model = small().eval()
    model.label_embed.weight.data *= 20
    tokens = {
        scale: sample(
            model, process, batch=2, length=192, label=label,
            config=SamplerConfig(steps=3, guidance=Guidance(scale)),
        ).tokens
        for scale in (1.0, 2.0)
    }  # fmt: skip
    assert not torch.equal(tokens[1.0], tokens[2.0])
    assert 0 <= tokens[2.0].min() <= tokens[2.0].max() < 256


def test_bad_guidance_gets_one_line() -> None:
    with pytest.raises(UserError, match="guidance must lie in"):
        Guidance(-1.0)
    with pytest.raises(UserError, match="guidance must be a number"):
        Guidance("2")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="did you mean 'rising'"):
        Guidance(2.0, "risin")
    process = Mixed(VOCAB, k=0.4)
    with pytest.raises(UserError, match="give labels"):
        sample(oracle(), process, batch=1, length=3, config=SamplerConfig(guidance=Guidance(2.0)))
    with pytest.raises(UserError, match=r"labels must lie in 0\.\.1, got 2"):
        sample(oracle(), process, batch=1, length=3, label=torch.tensor([2]))
    with pytest.raises(UserError, match="without classes"):
        plain = Oracle(None, N)
        sample(plain, process, batch=1, length=3, label=torch.tensor([0]))
