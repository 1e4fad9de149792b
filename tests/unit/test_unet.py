"""The U-Net: its output law, its head under losses and samplers, its shape, training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_images import recipe
from torch import Tensor, nn

from xdlm.api import tokenizer_of
from xdlm.cli.train import make_trainer
from xdlm.errors import UserError
from xdlm.models import UNet, UNetConfig, build_denoiser, drawing_head, head_stats, logistic
from xdlm.models.logistic import level_draws, level_log_probs, level_stats
from xdlm.models.unet import ResidualBlock, by_pixel
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform
from xdlm.objective import nelbo
from xdlm.ops import dense, draw_and_weigh, stats_of_logits
from xdlm.ops.rows import Impl
from xdlm.sampling import ConfidenceConfig, SamplerConfig, decode, sample
from xdlm.structs import Batch, Vocab
from xdlm.training.checkpoint import open_checkpoint
from xdlm.training.loss import DiffusionLoss
from xdlm.training.trained import read_trained

SMALL = UNetConfig(
    side=8, channels=8, multipliers="1-2", blocks=1, attention=4, dropout=0.0, n_classes=3
)
MASKED = Vocab(257, mask_id=256)
PROCESSES = [Masked(MASKED), Uniform(Vocab(256)), Mixed(MASKED, k=0.3), Gidd(MASKED)]


def small(vocab_size: int = 257, config: UNetConfig = SMALL) -> UNet:
    """With every weight away from zero, so that everything has a part in the result."""
    torch.manual_seed(0)
    model = UNet(config, vocab_size)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def some_tokens(batch: int = 2, high: int = 256) -> Tensor:
    return torch.randint(0, high, (batch, 192), generator=torch.Generator().manual_seed(1))


def test_levels_sum_to_one_and_the_ends_carry_the_tails() -> None:
    location = torch.linspace(-1.5, 1.5, 13, dtype=torch.float64)[:, None]
    raw = torch.linspace(-6, 6, 9, dtype=torch.float64)
    location, raw = (part.contiguous() for part in torch.broadcast_tensors(location, raw))
    probs = level_log_probs(location, raw, 256).exp()
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(raw), rtol=0, atol=1e-13)
    scale = (raw - 2).exp()
    edge = 1 - 1 / 255
    torch.testing.assert_close(probs[..., 0], torch.sigmoid((-edge - location) / scale))
    torch.testing.assert_close(probs[..., 255], torch.sigmoid((location - edge) / scale))
    middle = 2 * 100 / 255 - 1
    upper, lower = (torch.sigmoid((middle + h / 255 - location) / scale) for h in (1, -1))
    torch.testing.assert_close(probs[..., 100], upper - lower, rtol=1e-6, atol=1e-12)


def test_levels_have_the_right_gradient() -> None:
    location = torch.tensor([-0.9, 0.0, 0.31, 1.2], dtype=torch.float64, requires_grad=True)
    raw = torch.tensor([-3.0, 0.0, 1.5, -1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, s: level_log_probs(m, s, 16), (location, raw))


def test_levels_stay_finite_at_any_width() -> None:
    location = torch.tensor([-1.0, 0.3, 1.0], requires_grad=True)
    for raw in (-1e4, -20.0, 0.0, 20.0, 1e4):
        log_probs = level_log_probs(location, torch.full((3,), raw), 256)
        assert log_probs.isfinite().all()
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3), rtol=0, atol=1e-5)
        (gradient,) = torch.autograd.grad(log_probs[:, 7].sum(), location)
        assert gradient.isfinite().all()


def test_draws_without_levels_are_those_from_all_of_them() -> None:
    """The closed form against the slow twin in float64, the ends and any width included."""
    torch.manual_seed(0)
    n = 4000
    uniform = torch.rand(n, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1 - 1e-9  # beyond that, sums of levels are rounding
    place = torch.rand(n, dtype=torch.float64) * 2.4 - 1.2
    width = torch.linspace(-9, 9, n, dtype=torch.float64)[torch.randperm(n)]
    z = torch.randint(0, 300, (n,)).clamp_max(256)
    drawn, p_z = level_draws(place, width, uniform, z, 256)
    logits = torch.nn.functional.pad(level_log_probs(place, width, 256), (0, 1), value=-torch.inf)
    twin, p_twin = draw_and_weigh(logits, uniform, z)
    assert (drawn == twin).double().mean() > 0.999 and (drawn - twin).abs().max() <= 1
    torch.testing.assert_close(p_z, p_twin, rtol=1e-9, atol=1e-300)
    assert (drawn.min(), drawn.max()) == (0, 255) and bool((p_z[z == 256] == 0).all())
    lost = level_draws(place * torch.nan, width, uniform, z, 256)[0]
    assert bool(((lost >= 0) & (lost < 256)).all())  # some level, whatever a model says


def test_a_head_draws_by_itself_unless_its_logits_change() -> None:
    model, special = UNet(UNetConfig(side=4, channels=8, multipliers="1", attention=0), 257), (256,)
    hidden, uniform = torch.randn(50, 2), torch.rand(50, dtype=torch.float64)
    z, head = torch.randint(0, 257, (50,)), drawing_head(model, special)
    own, p_own = head.draw(hidden, uniform, z)
    slow, p_slow = head.draw(hidden, uniform, z, lambda logits: logits)
    assert (own == slow).double().mean() > 0.9  # logits in float32 may turn a draw
    torch.testing.assert_close(p_own, p_slow, rtol=1e-4, atol=1e-12)


def test_a_convolution_of_single_pixels_is_a_product() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(5, 7, 1).double()
    for memory in (torch.contiguous_format, torch.channels_last):
        h = torch.randn(2, 5, 4, 3, dtype=torch.float64).contiguous(memory_format=memory)
        found = by_pixel(h, layer, torch.arange(7))
        torch.testing.assert_close(found, layer(h) + torch.arange(7)[:, None, None])
        assert found.is_contiguous(memory_format=torch.channels_last)


def test_a_block_adds_both_biases() -> None:
    """Where the width changes, with attention behind it: written out by its layers."""
    torch.manual_seed(0)
    block = ResidualBlock(8, 12, 6, 0.0, attends=True).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    h, cond = torch.randn(2, 8, 4, 4).double(), torch.randn(2, 6).double()
    inner = (
        block.conv_in(nn.functional.silu(block.norm_in(h))) + block.condition(cond)[..., None, None]
    )
    found = block.skip(h) + block.conv_out(nn.functional.silu(block.norm_out(inner)))
    attention = block.attention
    assert attention is not None
    q, k, v = attention.qkv(attention.norm(found)).flatten(2).chunk(3, dim=1)
    attended = v @ ((q.mT @ k) / 12**0.5).softmax(-1).mT
    expected = found + attention.out(attended.view_as(found))
    torch.testing.assert_close(block(h, cond, False), expected)


def test_the_papers_shape() -> None:
    with torch.device("meta"):
        model = build_denoiser(UNetConfig(n_classes=10), 257)
    n_parameters = sum(p.numel() for p in model.parameters())
    assert n_parameters == pytest.approx(35.8e6, rel=0.005)  # 35.7 M in Ho et al., without classes
    attending = [name for name, _ in model.named_modules() if name.endswith("attention")]
    assert len(attending) == 2 + 1 + 3


def test_operations_are_counted() -> None:
    """About 6 G multiplications for an image in the literature; and by hand for a model of one size."""
    with torch.device("meta"):
        model = build_denoiser(UNetConfig(n_classes=10), 257)
    assert model.flops_per_token(3072) * 3072 / 3 == pytest.approx(2 * 6.1e9, rel=0.05)
    tiny = UNetConfig(side=4, channels=4, multipliers="1", blocks=1, attention=0)
    c, pixels = 4, 16
    embedding = 256 * 16 + 16 * 16
    into, out = 9 * 3 * c, 9 * c * 6
    block = 2 * 9 * c * c + 16 * c / pixels
    wide = (9 * 2 * c * c + 9 * c * c + 2 * c * c) + 16 * c / pixels
    attention = 4 * c * c + 2 * pixels * c
    products = pixels * (into + out + 3 * block + attention + 2 * wide) + embedding
    assert build_denoiser(tiny, 256).flops_per_token(48) == pytest.approx(3 * 2 * products / 48)


def test_an_untrained_model_expects_what_it_sees() -> None:
    """A new one has zero outputs: the law is centred on the noisy level, or on grey for a mask."""
    model = UNet(SMALL, 257).eval()
    z = some_tokens()
    z[:, :96] = 256
    location = model.trunk(z, torch.tensor([0.2, 0.9]))[..., 0]
    value = torch.where(z == 256, 0.0, z * 2 / 255 - 1)
    torch.testing.assert_close(location, torch.tanh(value))


def test_time_class_and_mask_are_seen() -> None:
    model = small().eval()
    z, t = some_tokens(1), torch.tensor([0.3])
    base = model.trunk(z, t, torch.tensor([1]))
    for other in (model.trunk(z, t, torch.tensor([2])), model.trunk(z, t + 0.3, torch.tensor([1]))):
        assert (other - base).abs().mean() > 1e-3
    torch.testing.assert_close(model.trunk(z, t), model.trunk(z, t, torch.tensor([-1])))
    blind = small(config=replace(SMALL, time_conditioning=False)).eval()
    torch.testing.assert_close(blind.trunk(z, t), blind.trunk(z, t + 0.3))


def test_pixels_are_where_the_tokens_say() -> None:
    """A change of one token is seen at its neighbours and, without attention, not far from it."""
    model = small(config=UNetConfig(side=32, channels=8, multipliers="1", blocks=1, attention=0))
    model.middle[0].attention = None  # type: ignore[union-attr]
    # Group norms carry everything everywhere: take them out.
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.GroupNorm):
                setattr(module, name, torch.nn.Identity())
    z = torch.zeros(1, 3072, dtype=torch.int64)
    changed = z.clone()
    changed[0, 3 * (32 * 16 + 16) + 1] = 200
    t = torch.tensor([0.5])
    model.eval()
    moved = (model.trunk(z, t) != model.trunk(changed, t)).any(-1).view(32, 32, 3)
    assert moved[16, 16].any() and moved[16, 17].any() and not moved[:, 31].any()
    rows, columns = moved.any(-1).nonzero(as_tuple=True)
    assert (rows.min() + rows.max()) / 2 == (columns.min() + columns.max()) / 2 == 16


def test_places_are_float32_under_lower_precision() -> None:
    model = small().to(torch.bfloat16).eval()
    assert model.trunk(some_tokens(), torch.rand(2)).dtype == torch.float32


@pytest.mark.parametrize("impl", ["auto", "chunked"])
@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: type(p).__name__)
def test_statistics_in_blocks_are_those_of_all_logits(
    process: NoiseProcess, impl: Impl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "block_elements", lambda device: 256 * 100)
    monkeypatch.setattr(logistic, "_CPU_BLOCK", 256 * 100)
    model = small(process.vocab.size)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 77, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    x = torch.randint(0, 256, (3, 77), generator=generator)
    z = process.corrupt(x, torch.tensor([0.2, 0.5, 0.8]), generator=generator)
    log_c = torch.full((3, 77), 1.5, dtype=torch.float64) if process.has_uniform_noise else None
    weights = torch.randn(4, 3, 77, generator=generator, dtype=torch.float64)

    def total(stats) -> Tensor:
        terms = (w * torch.where(s.isfinite(), s, 0.0) for w, s in zip(weights, stats, strict=True))
        return torch.stack([term.sum() for term in terms]).sum()

    special = process.special_ids
    whole = stats_of_logits(model.head(hidden), x, z, log_c, mask_id=special)
    parts = head_stats(model, hidden, x, z, log_c, mask_id=special, impl=impl)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)
    expected, found = (torch.autograd.grad(total(s), hidden)[0] for s in (whole, parts))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("summed", [True, False])
def test_the_short_way_errs_no_more_than_all_logits(summed: bool) -> None:
    """In float32 against float64: narrow and wide laws, ends, masks, and widths past their bounds."""
    torch.manual_seed(0)
    n, model = 1003, UNet(UNetConfig(side=8, channels=8, multipliers="1", attention=0), 257)
    x, z = torch.randint(0, 256, (n,)), torch.randint(0, 300, (n,)).clamp_max(256)
    x[:3] = torch.tensor([0, 255, 0])
    log_c = torch.linspace(-6, 12, n, dtype=torch.float64)[torch.randperm(n)] if summed else None
    rows, up = (
        torch.stack([torch.rand(n) * 2.4 - 1.2, torch.linspace(-9, 9, n)], -1),
        torch.randn(3, n),
    )

    def found(impl: Impl, dtype: torch.dtype) -> list[Tensor]:
        hidden = rows.to(dtype).requires_grad_()
        stats = head_stats(model, hidden, x, z, log_c, mask_id=256, impl=impl)
        log_z = torch.where(z < 256, stats.logit_z - stats.lse, 0.0)
        values = [stats.logit_x - stats.lse, log_z, stats.S]
        total = torch.stack([(v * part).sum() for v, part in zip(values, up, strict=True)]).sum()
        (slope,) = torch.autograd.grad(total, hidden)
        return [*(v.detach().double() for v in values), slope.double()]

    exact, eager = found("eager", torch.float64), found("eager", torch.float32)
    for ours, theirs, truth in zip(found("auto", torch.float32), eager, exact, strict=True):
        assert (ours - truth).norm() <= 2 * (theirs - truth).norm() + 1e-7 * truth.norm()


def test_a_block_of_levels_needs_no_gradient() -> None:
    rows, x = torch.randn(2, 5), torch.arange(5)
    stats = level_stats(*rows, x, x, torch.zeros(5), 256)
    with_it = level_stats(*rows.clone().requires_grad_(), x, x, torch.zeros(5), 256)
    assert torch.equal(stats.S, with_it.S) and with_it.S.requires_grad and not stats.S.requires_grad
    none = level_stats(*rows[:, :0], x[:0], x[:0], torch.zeros(0), 256)
    assert [len(field) for field in none] == [0, 0, 0, 0]


@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: type(p).__name__)
def test_training_loss_is_the_bound_of_the_logits(process: NoiseProcess) -> None:
    """With all rows looked at; and gradients reach every weight."""
    model = small(process.vocab.size)
    batch = Batch(some_tokens(4), torch.arange(4), label=torch.tensor([0, 1, 2, 0]))
    seen = {}
    trunk = model.trunk

    def spy(z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        seen.update(z=z, t=t, label=label)
        return trunk(z, t, label)

    model.trunk = spy  # type: ignore[method-assign]
    sums = DiffusionLoss(process)(model, batch, seed=0, step=0, global_batch=4)
    logits = model.head(trunk(seen["z"], seen["t"], batch.label))
    low, high = process.time_range
    bound = nelbo(process, logits, batch.tokens, seen["z"], seen["t"].double()).double().sum()
    torch.testing.assert_close(sums.loss, bound * (high - low), rtol=1e-4, atol=1e-4)
    sums.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    eager = DiffusionLoss(process, impl="eager")(model, batch, seed=0, step=0, global_batch=4)
    torch.testing.assert_close(eager.loss, sums.loss)


def test_it_learns_a_colour() -> None:
    torch.manual_seed(0)
    process, model = Masked(MASKED), UNet(replace(SMALL, n_classes=0), 257)
    tokens = torch.tensor([200, 30, 90]).repeat(64).expand(8, -1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        batch = Batch(tokens, torch.arange(8 * step, 8 * step + 8))
        sums = DiffusionLoss(process)(model, batch, seed=0, step=step, global_batch=8)
        optimizer.zero_grad()
        (sums.loss / tokens.numel()).backward()
        optimizer.step()
        losses.append(float(sums.elbo) / tokens.numel())
    assert sum(losses[:5]) / 5 > 4.5  # about log 256 = 5.5 nats for what it knows nothing of
    assert sum(losses[-10:]) / 10 < 0.7 * sum(losses[:5]) / 5


@pytest.mark.parametrize("impl", ["thinned", "dense", "gumbel", "starved"])
def test_sampling_gives_levels(impl: str) -> None:
    drawn = sample(
        small().eval(), PROCESSES[2], batch=2, length=192, label=torch.tensor([0, 2]),
        config=SamplerConfig(steps=3, impl=impl),
    )  # fmt: skip
    assert drawn.tokens.shape == (2, 192) and 0 <= drawn.tokens.min() <= drawn.tokens.max() < 256


def test_training_through_a_checkpoint(tmp_path: Path) -> None:
    model = "{kind: unet, side: 8, channels: 8, multipliers: 1-2, blocks: 1, attention: 4, n_classes: 3}"
    config = recipe(tmp_path, model)
    trainer = make_trainer(config, tokenizer_of(config.data))
    trainer.run()
    (folder,) = (tmp_path / "run").glob("step-*")
    trained = read_trained(open_checkpoint(folder))
    for name, average in trainer.ema.average.items():
        assert torch.equal(dict(trained.denoiser.named_parameters())[name], average)
    z, t = some_tokens(1), torch.tensor([0.4])
    with trainer.ema.applied(trainer.model):
        torch.testing.assert_close(trainer.model.eval()(z, t), trained.denoiser(z, t))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="multipliers must read like 1-2-2-2"):
        UNetConfig(multipliers="1,2")
    with pytest.raises(UserError, match="cannot be halved 3 times"):
        UNetConfig(side=28)
    with pytest.raises(
        UserError, match=r"attention must be one of .*\[32, 16, 8, 4\], or 0 .*, got 7"
    ):
        UNetConfig(attention=7)
    with pytest.raises(UserError, match=r"set data\.tokenizer to pixels"):
        UNet(SMALL, 50258)
    with pytest.raises(UserError, match="the model takes rows of 3072"):
        recipe(tmp_path, "{kind: unet}")
    with pytest.raises(UserError, match="images of 8 x 8 pixels; got 100"):
        small().trunk(torch.zeros(1, 100, dtype=torch.int64), torch.rand(1))
    with pytest.raises(UserError, match="without classes"):
        labels = torch.tensor([0])
        small(config=replace(SMALL, n_classes=0)).trunk(some_tokens(1), torch.rand(1), labels)
    with pytest.raises(UserError, match="use the ancestral sampler"):
        decode(
            small(), PROCESSES[2], given=some_tokens(1), frozen=torch.zeros(1, 192, dtype=torch.bool),
            config=ConfidenceConfig(steps=2),
        )  # fmt: skip
    assert math.prod((3, 8, 8)) == SMALL.own_length()
