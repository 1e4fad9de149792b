"""The losses against the dense reference, their limits, and their sign."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import PROCESSES, N, ordinary_tokens, probs_of, random_prediction

from xdlm import UserError, Vocab
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform, dense
from xdlm.objective import (
    WEIGHTINGS,
    bound_ends,
    elbo_weight,
    nelbo,
    step_kl,
    step_kl_between,
    stratified_times,
)

every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())


def cases(process: NoiseProcess) -> list[tuple[int, int]]:
    """(x, z) pairs: kept, masked, and (where noise allows) replaced."""
    x, other = ordinary_tokens(process)[2], ordinary_tokens(process)[5]
    pairs = [(x, x)] + [(x, m) for m in process.special_ids if process.terminal(0.0).b.at(
        torch.tensor([m])).item() > 0]  # fmt: skip
    return pairs + ([(x, other)] if process.has_uniform_noise else [])


def one(process: NoiseProcess, x: int, z: int, seed: int = 0):
    logits = random_prediction(process, seed)
    return logits, probs_of(process, logits), torch.tensor([[x]]), torch.tensor([[z]])


@every_process
@pytest.mark.parametrize("t", [0.02, 0.41, 0.97])
def test_nelbo_equals_dense(process: NoiseProcess, t: float) -> None:
    for x, z in cases(process):
        logits, probs, x_BL, z_BL = one(process, x, z)
        expected = dense.nelbo(process, probs, x, z, t)
        computed = nelbo(process, logits.view(1, 1, N), x_BL, z_BL, t)
        torch.testing.assert_close(computed[0, 0], expected, rtol=1e-6, atol=1e-11)


@every_process
@pytest.mark.parametrize(("s", "t"), [(0.0, 0.3), (0.2, 0.21), (0.1, 0.8), (0.5, 0.99)])
def test_step_kl_equals_dense(process: NoiseProcess, s: float, t: float) -> None:
    for x, z in cases(process):
        logits, probs, x_BL, z_BL = one(process, x, z, seed=3)
        expected = dense.step_kl(process, probs, x, z, s, t)
        computed = step_kl(process, logits.view(1, 1, N), x_BL, z_BL, s, t)
        torch.testing.assert_close(computed[0, 0], expected, rtol=1e-6, atol=1e-11)


@every_process
def test_many_small_steps_become_continuous_time(process: NoiseProcess) -> None:
    t, n_steps = 0.55, 1_000_000
    for x, z in cases(process):
        logits, _, x_BL, z_BL = one(process, x, z, seed=4)
        limit = nelbo(process, logits.view(1, 1, N), x_BL, z_BL, t)
        step = step_kl(process, logits.view(1, 1, N), x_BL, z_BL, t - 1 / n_steps, t)
        torch.testing.assert_close(n_steps * step, limit, rtol=1e-4, atol=1e-9)


@every_process
def test_reconstruction_is_minus_log_likelihood(process: NoiseProcess) -> None:
    t = 0.2
    for x, z in cases(process):
        logits, probs, x_BL, z_BL = one(process, x, z, seed=5)
        expected = -dense.posterior(process, probs, z, 0.0, t)[x].log()
        computed = step_kl(process, logits.view(1, 1, N), x_BL, z_BL, 0.0, t)
        torch.testing.assert_close(computed[0, 0], expected, rtol=1e-6, atol=1e-11)


@every_process
@pytest.mark.parametrize("gap", [30.0, 499.0, 600.0, 5000.0, torch.inf])
def test_reconstruction_of_what_was_all_but_ruled_out(process: NoiseProcess, gap: float) -> None:
    """x has the probability e^-gap, which float64 rounds to 0 from 745 on; the loss is about the gap."""
    t = 0.2
    coefs = process.coefs(torch.tensor([t], dtype=torch.float64))
    for x, z in cases(process):
        x_BL, z_BL = torch.tensor([[x]]), torch.tensor([[z]])
        if coefs.b.at(z_BL) == 0:  # it is no noise, and stays
            continue
        logits = torch.zeros(1, 1, N, dtype=torch.float64)
        logits[..., x] = -gap
        log_p_x = -gap - math.log(len(ordinary_tokens(process)) - 1 + math.exp(-gap))
        model = coefs.of(probs_of(process, logits[0, 0])[z_BL], z_BL)
        truth = coefs.of((x_BL == z_BL).double(), z_BL)
        computed = step_kl(process, logits, x_BL, z_BL, 0.0, t)
        torch.testing.assert_close(computed, (model / truth).log() - log_p_x, rtol=1e-9, atol=0)


@every_process
def test_start_of_the_bound_is_a_plain_kl(process: NoiseProcess) -> None:
    """From pure noise nothing of z_t is kept, so the step's law is the marginal at t_max."""
    x = ordinary_tokens(process)[2]
    logits, probs, x_BL, _ = one(process, x, x, seed=6)
    (noisy, target), _ = bound_ends(process, torch.zeros(1))
    q = dense.forward_matrix(process, process.time_range[1])
    truth, model = q[x], q.T @ probs
    expected = torch.where(truth > 0, truth * (truth / model).log(), 0.0).sum()
    for z in range(N):
        if noisy.b.at(torch.tensor([z])).item() == 0:
            continue
        computed = step_kl_between(
            process, target, noisy, logits.view(1, 1, N), x_BL, torch.tensor([[z]])
        )
        torch.testing.assert_close(computed[0, 0], expected, rtol=1e-6, atol=1e-12)


@every_process
def test_perfect_prediction_costs_nothing(process: NoiseProcess) -> None:
    for x, z in cases(process):
        logits = torch.full((1, 1, N), -200.0)
        logits[..., x] = 200.0
        for t in (0.01, 0.5, 0.99):
            args = (process, logits, torch.tensor([[x]]), torch.tensor([[z]]))
            assert nelbo(*args, t).abs().item() <= 1e-6
            assert step_kl(*args, t / 2, t).abs().item() <= 1e-6


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    name=st.sampled_from(sorted(PROCESSES)),
    t=st.floats(0.001, 0.999),
    sharpness=st.floats(0.0, 30.0),
    seed=st.integers(0, 2**20),
)
def test_losses_are_never_negative_in_float32(name, t, sharpness, seed) -> None:
    process = PROCESSES[name]
    x = torch.tensor([ordinary_tokens(process)])
    generator = torch.Generator().manual_seed(seed)
    z = process.corrupt(x, t, generator=generator)
    logits = torch.randn(*x.shape, N, generator=generator) * sharpness
    assert logits.dtype == torch.float32
    assert nelbo(process, logits, x, z, t).min() >= -1e-6
    assert step_kl(process, logits, x, z, t * 0.9, t).min() >= -1e-6


@pytest.mark.parametrize("mask_id", [0, 5, N - 1])
def test_mixing_ratio_limits(mask_id: int) -> None:
    vocab = Vocab(N, mask_id)
    generator = torch.Generator().manual_seed(0)
    x = torch.tensor([[i for i in range(N) if i != mask_id]])
    logits = torch.randn(1, x.shape[1], N, generator=generator, dtype=torch.float64)
    z = Masked(vocab).corrupt(x, 0.5, generator=generator)
    masked = nelbo(Masked(vocab), logits, x, z, 0.5)
    log_probs = logits.index_fill(-1, torch.tensor([mask_id]), -torch.inf).log_softmax(-1)
    alpha, slope = 1 - 0.999 * 0.5, 0.999
    by_hand = slope / (1 - alpha) * -log_probs.gather(-1, x[..., None])[..., 0] * (z == mask_id)
    torch.testing.assert_close(masked, by_hand)
    torch.testing.assert_close(nelbo(Mixed(vocab, k=0), logits, x, z, 0.5), masked)
    # The approach is like k log k: a kept token costs a little as soon as it may be wrong.
    gaps = [
        (nelbo(Mixed(vocab, k=k), logits, x, z, 0.5) - masked).abs().max() for k in (1e-4, 1e-8)
    ]
    assert gaps[1] < 1e-5 < gaps[0] < 0.05


def test_uniform_limit_equals_the_published_udlm_loss() -> None:
    """UDLM's continuous-time loss (Schiff et al. 2024), in its own notation and with its own sign."""
    vocab, t = Vocab(N), 0.43
    process = Uniform(vocab)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(N, generator=generator, dtype=torch.float64)
    probs = logits.softmax(-1)
    alpha, slope = 1 - 0.999 * t, -0.999
    for x, i in [(3, 3), (3, 7)]:
        x_bar = torch.full((N,), 1 - alpha, dtype=torch.float64)
        x_bar[x] += N * alpha
        x_bar_theta = N * alpha * probs + 1 - alpha
        others = torch.arange(N) != i
        log_term = (x_bar[others] / x_bar[i]) * torch.log(
            x_bar_theta[i] * x_bar[others] / (x_bar_theta[others] * x_bar[i])
        )
        published = slope / (N * alpha) * (N / x_bar[i] - N / x_bar_theta[i] - log_term.sum())
        for ours in (process, Mixed(vocab, k=1)):
            computed = nelbo(
                ours, logits.view(1, 1, N), torch.tensor([[x]]), torch.tensor([[i]]), t
            )
            torch.testing.assert_close(computed[0, 0], published, rtol=1e-9, atol=1e-12)


def test_gradients_are_finite_everywhere() -> None:
    for process in PROCESSES.values():
        x = torch.tensor([ordinary_tokens(process)])
        z = process.corrupt(x, 0.7, generator=torch.Generator().manual_seed(0))
        logits = torch.randn(1, x.shape[1], N, generator=torch.Generator().manual_seed(1))
        for loss in (nelbo, lambda *a: step_kl(*a[:4], 0.0, a[4])):
            leaf = logits.clone().requires_grad_()
            loss(process, leaf, x, z, 0.7).sum().backward()
            assert leaf.grad is not None and leaf.grad.isfinite().all()
            if process.special_ids:
                assert (leaf.grad[..., list(process.special_ids)] == 0).all()


def test_bound_is_honest_on_a_known_law() -> None:
    """Independent tokens of a known law, predicted perfectly: start + integral + end = entropy.

    Perfect is the law itself whatever z is, since the other positions say nothing of this one. The
    expectation over x and z is a sum, so only the integral over time has an error (midpoint rule).
    """
    law = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1, 0.0], dtype=torch.float64)
    entropy = -torch.xlogy(law, law).sum()
    vocab = Vocab(6, 5)
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(6))
    for process in (Masked(vocab), Mixed(vocab, k=0.3), Gidd(vocab)):

        def expected_loss(coefs, loss, process=process):
            x, z = (column.expand(len(coefs.alpha), -1) for column in pairs.T)
            weight = law[x] * coefs.of((x == z).double(), z)
            return (weight * loss(law.log().expand(*x.shape, 6), x, z).nan_to_num(0.0)).sum(-1)

        low, high = process.time_range
        # Midpoints of a grid that is dense at both ends, where GIDD's rates are singular.
        angle = torch.pi * (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
        t = low + (high - low) * (1 - angle.cos()) / 2
        density = (high - low) * torch.pi / 2 * angle.sin()
        integrand = expected_loss(
            process.coefs(t), lambda lg, x, z, p=process, t=t: nelbo(p, lg, x, z, t)
        )
        integral = (integrand * density).mean()
        start, end = bound_ends(process, torch.zeros(1))
        first, last = (
            expected_loss(e.noisy, lambda lg, x, z, p=process, e=e: e.loss(p, lg, x, z))[0]
            for e in (start, end)
        )
        assert last > 1e-4
        assert first > 1e-7
        torch.testing.assert_close(first + integral + last, entropy, rtol=1e-4, atol=0)


def test_times_are_stratified_over_the_global_batch() -> None:
    index = torch.arange(64)
    whole = stratified_times(7, 3, index, 64, time_range=(0.1, 0.9))
    split = torch.cat([stratified_times(7, 3, index[i::8], 64, time_range=(0.1, 0.9))
                       for i in range(8)])  # fmt: skip
    assert torch.equal(whole.sort().values, split.sort().values)
    assert ((whole - 0.1) / 0.8 * 64).floor().unique().numel() == 64
    assert not torch.equal(whole, stratified_times(7, 4, index, 64, time_range=(0.1, 0.9)))


def test_weightings_agree_on_what_is_free() -> None:
    process = Masked(Vocab(N, 4))
    x = torch.tensor([[0, 1, 2, 3]])
    z = torch.tensor([[0, 4, 2, 4]])
    coefs = process.coefs(torch.tensor([0.01]))
    for weighting in WEIGHTINGS.values():
        assert torch.equal(weighting(coefs, x, z) > 0, z == 4)
    assert WEIGHTINGS["clipped"](coefs, x, z).max() == 2.0 < elbo_weight(coefs, x, z).max()
    dynamic = WEIGHTINGS["dynamic"](PROCESSES["gidd"].coefs(torch.tensor([0.5])), x, z)
    assert dynamic[0, 1] == 2.0 and 0 < dynamic[0, 0] < 0.1


@pytest.mark.parametrize("settings", [{}, {"p_uniform": 0.0}, {"gamma": 2.0}])
def test_gidd_at_the_end_of_time(settings: dict) -> None:
    """The rates are infinite at t = 1 and the loss is not: it goes on from just before."""
    process = Gidd(Vocab(N, 4), **settings)
    logits = random_prediction(process, 0).view(1, 1, N).requires_grad_()
    x, z = torch.tensor([[2]]), torch.tensor([[4]])
    at_one = nelbo(process, logits, x, z, 1.0)
    at_one.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    torch.testing.assert_close(at_one, nelbo(process, logits, x, z, 1 - 2e-4), rtol=0.3, atol=1e-3)


def test_wrong_arguments_are_named() -> None:
    process = Mixed(Vocab(N, 4))
    logits, x = torch.zeros(1, 1, N), torch.tensor([[2]])
    with pytest.raises(UserError, match="s must be smaller than t"):
        step_kl(process, logits, x, x, 0.5, 0.5)
    with pytest.raises(UserError, match="over 12 tokens, the vocabulary has 11"):
        nelbo(process, torch.zeros(1, 1, N + 1), x, x, 0.5)


def test_a_rate_that_is_no_number_shows() -> None:
    """Weights must not turn NaN into 0: a broken process would train to a perfect loss."""
    good = Mixed(Vocab(N, 4)).coefs(torch.tensor([0.5]))
    broken = replace(good, d_alpha=good.d_alpha * torch.nan)
    assert elbo_weight(broken, torch.tensor([[2]]), torch.tensor([[4]])).isnan().all()
