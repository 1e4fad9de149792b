"""The Triton kernels against their slow twins, on a GPU."""

from __future__ import annotations

import pytest
import torch

from xdlm import Vocab
from xdlm.models import PRESETS, DiT, DiTConfig
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform
from xdlm.objective import elbo_weight, nelbo_of_stats, row_losses
from xdlm.ops import draw_and_weigh, row_loss, row_stats
from xdlm.ops.fused import TritonBlock
from xdlm.ops.head import DrawingHead
from xdlm.sampling import SamplerConfig, sample, time_grid
from xdlm.structs import Batch, HeadRows
from xdlm.training.engine import Replicated
from xdlm.training.loss import DiffusionLoss
from xdlm.training.parallel import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
SHAPES = [
    (77, 33, 1023, 511),
    (64, 64, 50257, 0),
    (130, 128, 50258, 50257),
    (90, 96, 126464, 126336),
]


def inputs(rows: int, width: int, vocab: int, mask_id: int, dtype: torch.dtype):
    generator = torch.Generator("cuda").manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    hidden, weight, bias = normal(rows, width), normal(vocab, width) * 0.2, normal(vocab)
    x = torch.randint(0, vocab - 1, (rows,), generator=generator, device="cuda")
    x += x >= mask_id
    z = torch.where(torch.rand(rows, generator=generator, device="cuda") < 0.5, mask_id, x.roll(1))
    z[::5] = x[::5]
    times = torch.rand(rows, generator=generator, device="cuda", dtype=torch.float64)
    coefs = Mixed(Vocab(vocab, mask_id), k=0.1).coefs(times * 0.98 + 0.01)
    return [v.to(dtype) for v in (hidden, weight, bias)], x, z, coefs


def everything(impl: str, leaves, x, z, coefs, mask_id: int) -> list[torch.Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    stats = row_stats(*leaves, x, z, coefs.log_c, mask_id=mask_id, impl=impl)
    losses = nelbo_of_stats(coefs, stats, x, z)
    return [*stats, losses, *torch.autograd.grad(losses.double().sum(), leaves)]


def error(value: torch.Tensor, truth: torch.Tensor) -> float:
    finite = truth.isfinite()
    return float((value.double() - truth)[finite].norm() / truth[finite].norm())


@pytest.mark.parametrize("loud", [1, 20])
@pytest.mark.parametrize(("rows", "width", "vocab", "mask_id"), SHAPES)
def test_float32_is_as_exact_as_eager(rows, width, vocab, mask_id, loud: int) -> None:
    """And where one token has nearly all of a row's probability."""
    leaves, x, z, coefs = inputs(rows, width, vocab, mask_id, torch.float32)
    leaves[1] *= loud
    exact = everything("eager", [v.double() for v in leaves], x, z, coefs, mask_id)
    eager = everything("eager", leaves, x, z, coefs, mask_id)
    fused = everything("fused", leaves, x, z, coefs, mask_id)
    for truth, slow, fast in zip(exact, eager, fused, strict=True):
        assert error(fast, truth.double()) <= 2 * error(slow, truth.double()) + 1e-9


@pytest.mark.parametrize(("rows", "width", "vocab", "mask_id"), SHAPES)
def test_bfloat16_is_as_exact_as_eager(rows, width, vocab, mask_id) -> None:
    if width % 8:
        width += 8 - width % 8
    leaves, x, z, coefs = inputs(rows, width, vocab, mask_id, torch.bfloat16)
    exact = everything("eager", [v.double() for v in leaves], x, z, coefs, mask_id)
    eager = everything("eager", leaves, x, z, coefs, mask_id)
    fused = everything("fused", leaves, x, z, coefs, mask_id)
    for truth, slow, fast in zip(exact, eager, fused, strict=True):
        assert error(fast, truth.double()) <= 2 * error(slow, truth.double()) + 1e-6


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-2)])
def test_one_sweep_equals_autograd(monkeypatch, bias: bool, dtype, tolerance: float) -> None:
    rows, width, vocab, mask_id = SHAPES[2]
    monkeypatch.setattr(TritonBlock, "gradient_elements", 64 * vocab)  # several blocks add up
    (hidden, weight, offset), x, z, coefs = inputs(rows, width, vocab, mask_id, dtype)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    given = offset.requires_grad_() if bias else None
    wanted = [*leaves, given] if given is not None else leaves
    weights = elbo_weight(coefs, x, z)

    total = row_loss(
        HeadRows(*leaves, given, x, z, coefs.log_c), row_losses(coefs, x, z, weights),
        mask_id=mask_id, impl="fused",
    )  # fmt: skip
    ours = torch.autograd.grad(total, wanted)
    stats = row_stats(*leaves, given, x, z, coefs.log_c, mask_id=mask_id, impl="eager")
    reference = nelbo_of_stats(coefs, stats, x, z).double().sum()
    theirs = torch.autograd.grad(reference, wanted)
    torch.testing.assert_close(total, reference, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        assert error(a, b.double()) < tolerance


def test_memory_does_not_grow_with_rows_times_vocabulary() -> None:
    """The loss at V = 126,464 and 16,384 rows: value and gradient in under 3 GB of workspace."""
    vocab, rows, width = 126_464, 16_384, 512
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x = torch.randint(0, vocab - 1, (rows,), device="cuda")
    z = torch.full_like(x, vocab - 1)
    coefs = Mixed(Vocab(vocab, vocab - 1)).coefs(
        torch.rand(rows, device="cuda").double() * 0.9 + 0.05
    )
    weights = elbo_weight(coefs, x, z)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    rows_ = HeadRows(hidden, weight, None, x, z, coefs.log_c)
    row_loss(rows_, row_losses(coefs, x, z, weights), mask_id=vocab - 1).backward()
    assert torch.cuda.max_memory_allocated() - before < 3e9


def test_draws_equal_the_slow_twin() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    vocab, rows = 50_258, 300
    hidden = torch.randn(rows, 64, device="cuda", generator=generator)
    weight = torch.randn(vocab, 64, device="cuda", generator=generator) * 0.3
    bias = torch.randn(vocab, device="cuda", generator=generator)
    u = torch.rand(rows, device="cuda", generator=generator, dtype=torch.float64)
    u[0], u[1] = 0.0, 1 - 2.0**-53
    z = torch.randint(0, vocab, (rows,), device="cuda", generator=generator)
    drawn, p_z = DrawingHead(weight, bias, (vocab - 1,)).draw(hidden, u, z)
    logits = (hidden.double() @ weight.double().T + bias).index_fill(
        1, torch.tensor([vocab - 1], device="cuda"), -torch.inf
    )
    expected, p_expected = draw_and_weigh(logits, u, z)
    # Logits differ in the last bits of float32, which moves a few boundaries past a uniform.
    assert (drawn == expected).double().mean() > 0.99
    torch.testing.assert_close(p_z, p_expected, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("vocab", "special"), [(5, (2,)), (129, ()), (600, tuple(range(256, 512)))]
)
def test_draws_of_small_vocabularies(vocab: int, special: tuple[int, ...], dtype) -> None:
    """Within one tile, or with a tile that has no ordinary token; a width that is no multiple of 64."""
    generator = torch.Generator("cuda").manual_seed(vocab)
    rows = 300

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    hidden, head = normal(rows, 72), DrawingHead(normal(vocab, 72) * 0.2, normal(vocab), special)
    u = torch.rand(rows, generator=generator, device="cuda", dtype=torch.float64)
    z, bar = torch.arange(rows, device="cuda") % vocab, torch.full((rows,), 0.1, device="cuda")
    weight, bias = head.plain.weight.double(), head.plain.bias
    assert bias is not None
    logits = hidden.double() @ weight.T + bias.double()
    logits[:, list(special)] = -torch.inf
    expected, p_expected = draw_and_weigh(logits, u, z)
    found = [head.draw(hidden, u, z)]
    if head.can_count(hidden):
        count = torch.tensor(rows, device="cuda")
        found.append(head.draw_counted(hidden, u, z, bar, count))
    for drawn, p_z in found:
        assert (drawn != expected).sum() <= 1  # a number may lie at the edge of a token
        torch.testing.assert_close(p_z, p_expected, rtol=1e-4, atol=0)


def test_tail_of_the_draw() -> None:
    vocab, p = 1500, 1e-7
    weight = torch.eye(vocab, device="cuda")
    for tail in (0, 700, 1499):
        logits = torch.full((vocab,), torch.log(torch.tensor((1 - p) / (vocab - 1))).item())
        logits[tail] = torch.log(torch.tensor(p, dtype=torch.float64)).float()
        start = tail * (1 - p) / (vocab - 1)
        grid = start + torch.linspace(-5 * p, 6 * p, 11_001, dtype=torch.float64)
        grid = grid[(grid >= 0) & (grid < 1)].cuda()
        rows = logits.cuda().expand(len(grid), -1).contiguous()
        drawn, _ = DrawingHead(weight, None, ()).draw(rows, grid, torch.zeros_like(grid).long())
        width = (drawn == tail).double().sum() * (11 * p / 11_000)
        assert abs(width / p - 1) < 5e-3


@pytest.mark.parametrize("process", [
    Masked(Vocab(40, 39)), Mixed(Vocab(40, 7), k=0.3), Uniform(Vocab(40)), Gidd(Vocab(40, 39)),
], ids=["masked", "mixed", "uniform", "gidd"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sampler_follows_the_posterior(process: NoiseProcess, dtype: torch.dtype) -> None:
    """A model of constant prediction: after each leg the frequencies are f_s(prediction, .)."""
    model = DiT(PRESETS["nano"], 40).to(DEVICE, dtype)
    with torch.no_grad():
        model.out.bias.copy_(torch.randn(40, generator=torch.Generator().manual_seed(0)))
    logits = model.out.bias.detach().double().cpu()
    logits[list(process.special_ids)] = -torch.inf
    law, frames = logits.softmax(-1), []
    config = SamplerConfig(steps=3)
    sample(model, process, batch=64, length=512, config=config, seed=1,
           on_frame=lambda z: frames.append(z.cpu()))  # fmt: skip
    n = 64 * 512
    for frame, leg in zip(frames, time_grid(process, 3, torch.zeros(1)), strict=True):
        coefs = leg.at_s.index(0)
        expected = coefs.alpha * law + coefs.b.dense(40)
        seen = torch.bincount(frame.flatten(), minlength=40).double() / n
        tolerance = 5 * (expected * (1 - expected) / n).sqrt() + 3 / n
        assert ((seen - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("shape", [(4, 48), (3, 256), (5, 200), (1, 1024)], ids=str)
@pytest.mark.parametrize("process", [
    Masked(Vocab(40, 39)), Mixed(Vocab(40, 7), k=0.3), Uniform(Vocab(40)), Gidd(Vocab(40, 39)),
], ids=["masked", "mixed", "uniform", "gidd"])  # fmt: skip
def test_loss_and_gradients_are_those_of_the_cpu(process: NoiseProcess, shape) -> None:
    """Same weights, same seed, same samples: noise, picked rows, statistics and all."""
    torch.manual_seed(0)
    model = DiT(DiTConfig(depth=2, width=64, heads=2, cond_width=16, dropout=0.0), 40)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    known = torch.tensor([i for i in range(40) if i not in process.special_ids])
    tokens = known[torch.randint(0, len(known), shape)]
    for kept_rows in (1.0, 0.1):
        for step in range(4):  # the trunk is recorded on the way
            found = []
            for device in ("cpu", "cuda"):
                model.to(device).zero_grad()
                index = step * shape[0] + torch.arange(shape[0])
                sums = DiffusionLoss(process, kept_rows=kept_rows)(
                    model, Batch(tokens.to(device), index.to(device)),
                    seed=3, step=step, global_batch=shape[0],
                )  # fmt: skip
                sums.loss.backward()
                # Copies: what moves the model moves its gradients too.
                gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                found.append([v.cpu() for v in (sums.loss.detach(), *gradients)])
            for here, there in zip(*found, strict=True):
                assert error(there, here.double()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [31, 5001])
def test_training_with_fused_and_eager_ends_alike(size: int, dtype: torch.dtype) -> None:
    """200 steps on a text of regular sentences, same noise, same order: the same loss within noise."""
    words = torch.randint(0, size - 1, (8, 3), generator=torch.Generator().manual_seed(0))
    process = Mixed(Vocab(size, size - 1), k=0.1)
    ends = {}
    for impl in ("fused", "eager"):
        torch.manual_seed(0)
        model = DiT(DiTConfig(depth=2, width=64, heads=2, cond_width=16, dropout=0.0), size)
        engine = Replicated(model.to(DEVICE), dtype, World())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loss = DiffusionLoss(process, impl=impl, kept_rows=0.1)
        history = []
        for step in range(200):
            pick = torch.randint(0, 8, (32, 8), generator=torch.Generator().manual_seed(step))
            index = step * 32 + torch.arange(32)
            batch = Batch(words[pick].flatten(1).to(DEVICE), index.to(DEVICE))
            engine.refresh()
            sums = loss(engine.running.train(), batch, seed=0, step=step, global_batch=32)
            engine.backward(sums.loss / batch.tokens.numel(), last=True)
            optimizer.step()
            optimizer.zero_grad()
            history.append(float(sums.elbo) / batch.tokens.numel())
        ends[impl] = sum(history[-50:]) / 50
    assert abs(ends["fused"] - ends["eager"]) < 0.03 * ends["eager"]
