"""The loss module: the bound on all rows, or thinned without bias; noise is the sample's own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from xdlm.config import LossConfig, ProcessConfig
from xdlm.evaluation import row_bounds
from xdlm.evaluation.likelihood import bent_times
from xdlm.models import PRESETS, DiT
from xdlm.noise import Masked, Mixed, NoiseProcess, Uniform
from xdlm.objective import nelbo, stratified_times
from xdlm.ops import gather
from xdlm.structs import Batch, Vocab, align
from xdlm.training.loss import DiffusionLoss
from xdlm.training.noised import noised_in_torch


def _rounding(multiple: int) -> Callable[[gather.PickedRows], tuple[torch.Tensor, int]]:
    def order(self: gather.PickedRows) -> tuple[torch.Tensor, int]:
        places, count = gather.ordered_rows(self._mask)
        return gather.padded(places, int(count), multiple), int(count)

    return order


def test_training_and_evaluation_tell_the_time() -> None:
    """A recording trunk: what it is told are the times at which its input was noised."""
    process, told = Masked(Vocab(20, 19)), []
    model = DiT(PRESETS["nano"], 20)
    trunk = model.trunk
    model.trunk = lambda z, t, label=None: told.append(t) or trunk(z, t, label)
    index = torch.arange(4)
    batch = Batch(torch.zeros(4, 6, dtype=torch.int64), index)
    DiffusionLoss(process)(model, batch, seed=3, step=2, global_batch=4)
    expected = stratified_times(3, 2, index, 4, time_range=process.time_range)
    torch.testing.assert_close(told.pop().double(), expected, rtol=1e-6, atol=1e-6)
    even = torch.rand(4, 1, dtype=torch.float64)
    row_bounds(model, process, batch.tokens, index, even, seed=3)
    drawn, start, end = told
    expected, _ = bent_times(even[:, 0], process.time_range)
    torch.testing.assert_close(drawn.double(), expected, rtol=1e-6, atol=1e-6)
    assert (start == 1).all()
    assert end.tolist() == pytest.approx([process.time_range[0]] * 4)


def test_loss_module_equals_nelbo_on_all_rows() -> None:
    """Skipping rows of zero weight, gathering and chunking change nothing."""
    process = Masked(Vocab(20, 19))
    torch.manual_seed(0)
    model = DiT(PRESETS["nano"], 20).eval()
    torch.nn.init.normal_(model.out.weight)
    batch = Batch(torch.randint(0, 19, (4, 16)), torch.arange(4))
    sums = DiffusionLoss(process)(model, batch, seed=3, step=0, global_batch=4)
    from xdlm.ops import Stream, uniform

    t = stratified_times(3, 0, torch.arange(4), 4, time_range=process.time_range)
    u = uniform(3, Stream.CORRUPT, torch.arange(4)[:, None], torch.arange(16)[None])
    z = process.corrupt(batch.tokens, t, uniform=u)
    low, high = process.time_range
    expected = nelbo(process, model(z, t), batch.tokens, z, t).double().sum() * (high - low)
    torch.testing.assert_close(sums.loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("process", [Masked(Vocab(12, 11)), Mixed(Vocab(12, 5), k=0.3)])
def test_rows_that_are_not_picked_change_nothing(monkeypatch, process) -> None:
    """A GPU rounds the number of rows up and puts the picked ones first; the loss is the same."""
    torch.manual_seed(0)
    model = DiT(PRESETS["nano"], 12)
    torch.nn.init.normal_(model.out.weight)
    known = torch.tensor([i for i in range(11) if i not in process.special_ids])
    batch = Batch(known[torch.randint(0, len(known), (4, 48))], torch.arange(4))
    loss = DiffusionLoss(process, kept_rows=0.2)
    found = []
    for multiple in (None, 64, 256):
        if multiple is not None:
            monkeypatch.setattr(gather.PickedRows, "order", _rounding(multiple))
        model.zero_grad()
        sums = loss(model, batch, seed=0, step=0, global_batch=4)
        sums.loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([sums.loss.detach(), *gradients])
    for other in found[1:]:
        for ours, theirs in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_thinning_kept_rows_is_unbiased() -> None:
    config = ProcessConfig(kind="mixed", k=0.5)
    process = config.build(Vocab(20, 19))
    torch.manual_seed(0)
    model = DiT(PRESETS["nano"], 20).eval()
    torch.nn.init.normal_(model.out.weight)
    tokens = torch.randint(0, 19, (256, 16))
    full, thinned = [], []
    for repeat in range(12):
        batch = Batch(tokens, repeat * 256 + torch.arange(256))
        for rows, losses in ((1.0, full), (0.2, thinned)):
            loss = DiffusionLoss(process, kept_rows=rows)
            sums = loss(model, batch, seed=0, step=repeat, global_batch=256)
            losses.append(float(sums.elbo) / tokens.numel())
    difference = np.array(thinned) - np.array(full)
    assert difference.std() > 0
    assert abs(difference.mean()) < 4 * difference.std() / np.sqrt(len(difference))


@pytest.mark.parametrize(
    "process", [Mixed(Vocab(1001, 1000), k=k) for k in (0.001, 0.1, 0.9)] + [Uniform(Vocab(1000))]
)
def test_thinning_leaves_gradients_quiet(process: NoiseProcess) -> None:
    """Of a model that knows how frequent tokens are and no more, the worst case for unchanged ones: thinned
    by default, they add less to the second moment of the gradient than the changed ones have. Looked at
    evenly, two in a hundred, those of uniform noise would add twice as much as all others."""
    batch, length, n = 256, 32, 1000
    frequency = 1 / torch.arange(1.0, n + 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.multinomial(frequency, batch * length, replacement=True, generator=generator)
    x, index = x.view(batch, length), torch.arange(batch)
    t = stratified_times(0, 0, index, batch, time_range=process.time_range)
    found = noised_in_torch(process, process.coefs(t), x, index, 0, LossConfig().kept_rows)
    logits = torch.full((process.vocab.size,), -30.0)
    logits[:n] = frequency.log()
    logits = logits.expand(batch, length, -1).clone().requires_grad_()
    loss = nelbo(process, logits, x, found.z, t) * found.scale
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    moment = gradient.double().square().sum(-1)
    kept = found.z == x
    assert moment[kept].sum() < 0.75 * moment[~kept].sum()
    assert found.picked[kept].float().mean() < 0.25


@pytest.mark.parametrize("process", [Mixed(Vocab(1001, 1000), k=0.1), Uniform(Vocab(1000))])
def test_unchanged_tokens_are_kept_as_the_help_says(process: NoiseProcess) -> None:
    """With `kept_rows` times their loss under a uniform prediction, to a few percent."""
    batch, n = 256, 1000
    x, index = torch.arange(batch * 32).view(batch, 32) % n, torch.arange(batch)
    t = torch.linspace(0.01, 0.99, batch, dtype=torch.float64)
    coefs = process.coefs(t)
    found = noised_in_torch(process, coefs, x, index, 0, 0.1)
    logits = torch.full((batch, 32, process.vocab.size), -1e4)
    logits[..., :n] = 0
    loss = nelbo(process, logits, x, found.z, t)
    noise = coefs.b.at(found.z)
    expected = torch.maximum(0.1 * loss, noise / (align(coefs.alpha, x) + noise)).clamp_max(1.0)
    looked_at = found.picked & (found.z == x)
    assert looked_at.sum() > 100
    torch.testing.assert_close(
        1 / found.scale[looked_at], expected[looked_at].double(), rtol=0.06, atol=0.0
    )


def test_splitting_a_batch_over_processes_gives_the_same_noise() -> None:
    process = ProcessConfig().build(Vocab(20, 19))
    model = DiT(PRESETS["nano"], 20).eval()
    torch.nn.init.normal_(model.out.weight)
    tokens, index = torch.randint(0, 19, (8, 16)), 40 + torch.arange(8)
    loss = DiffusionLoss(process)

    def total(part: slice) -> float:
        batch = Batch(tokens[part], index[part])
        return float(loss(model, batch, seed=1, step=5, global_batch=8).elbo)

    whole = total(slice(None))
    for ways in (2, 4, 8):
        np.testing.assert_allclose(
            sum(total(slice(i, None, ways)) for i in range(ways)), whole, 1e-6
        )


def test_label_dropout_is_keyed_by_sample() -> None:
    loss = DiffusionLoss(Masked(Vocab(20, 19)), label_dropout=0.25)
    label, index = torch.arange(4000) % 10, torch.arange(4000)
    dropped = loss._drop_labels(label, index, seed=0)
    assert ((dropped == -1) | (dropped == label)).all()
    assert abs((dropped == -1).double().mean() - 0.25) < 0.03
    assert torch.equal(loss._drop_labels(label[1000:], index[1000:], seed=0), dropped[1000:])
