"""The noise algebra against real matrices and against counting."""

from __future__ import annotations

import pytest
import torch
from processes import PROCESSES, SCHEDULES, N, ordinary_tokens, probs_of, random_prediction

from xdlm import UserError, Vocab
from xdlm.noise import (
    Gidd,
    LogLinear,
    Masked,
    Mixed,
    NoiseProcess,
    Polynomial,
    Uniform,
    dense,
)

every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())
EYE = torch.eye(N, dtype=torch.float64)
TIMES = (0.03, 0.37, 0.5, 0.93)


@every_process
def test_derivatives_equal_autograd(process: NoiseProcess) -> None:
    t = torch.tensor(TIMES, dtype=torch.float64, requires_grad=True)
    coefs = process.coefs(t)
    pairs = [(coefs.alpha, coefs.d_alpha), (coefs.b_tok, coefs.d_b_tok)]
    pairs += [
        (coefs.b.special[:, i], coefs.d_b.special[:, i]) for i in range(len(process.special_ids))
    ]
    for value, derivative in pairs:
        if not value.requires_grad:  # masked noise: b on ordinary tokens is the constant 0
            assert (derivative == 0).all()
            continue
        (expected,) = torch.autograd.grad(value.sum(), t, retain_graph=True)
        torch.testing.assert_close(derivative, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_schedule_ends_at_one_and_eps(schedule) -> None:
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)
    alpha = schedule(t).alpha
    torch.testing.assert_close(alpha, torch.tensor([1.0, schedule.eps], dtype=torch.float64))


@every_process
def test_coefficients_are_the_matrix(process: NoiseProcess) -> None:
    for t in TIMES:
        coefs = process.coefs(t)
        built = coefs.alpha * EYE + coefs.b.dense(N)
        torch.testing.assert_close(built, dense.forward_matrix(process, t), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(coefs.b.total(N), 1 - coefs.alpha, rtol=1e-12, atol=1e-14)
        assert coefs.alpha.dtype == coefs.b_mask.dtype == torch.float64


@every_process
def test_rows_sum_to_one_and_compose(process: NoiseProcess) -> None:
    s, t = 0.21, 0.74
    between = process.bridge(s, t)
    q_ts = between.alpha * EYE + between.b.dense(N)
    q_s, q_t = dense.forward_matrix(process, s), dense.forward_matrix(process, t)
    for matrix in (q_s, q_t, q_ts):
        torch.testing.assert_close(matrix.sum(-1), torch.ones(N, dtype=torch.float64))
        assert (matrix >= 0).all()
    torch.testing.assert_close(q_s @ q_ts, q_t, rtol=1e-12, atol=1e-14)


@every_process
def test_posterior_equals_bayes(process: NoiseProcess) -> None:
    s, t = 0.3, 0.62
    probs = probs_of(process, random_prediction(process, seed=1))
    reachable = [z for z in range(N) if process.has_uniform_noise or z in process.special_ids]
    z = torch.tensor([reachable])
    computed = process.posterior(probs.expand(1, z.shape[1], N), z, s, t)
    for column, token in enumerate(reachable):
        expected = dense.posterior(process, probs, token, s, t)
        torch.testing.assert_close(computed[0, column], expected, rtol=1e-9, atol=1e-13)


@every_process
def test_corruption_matches_the_marginal(process: NoiseProcess) -> None:
    draws, t = 40_000, 0.6
    x = torch.full((1, draws), ordinary_tokens(process)[3])
    z = process.corrupt(x, torch.tensor([t]), generator=torch.Generator().manual_seed(0))
    seen = torch.bincount(z[0], minlength=N).double() / draws
    expected = dense.forward_matrix(process, t)[x[0, 0]]
    assert (seen[expected == 0] == 0).all()
    # Five standard errors of a binomial frequency, for each token.
    assert ((seen - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()


@every_process
def test_prior_matches_terminal(process: NoiseProcess) -> None:
    draws = 40_000
    z = process.prior((4, draws // 4), generator=torch.Generator().manual_seed(1))
    seen = torch.bincount(z.flatten(), minlength=N).double() / draws
    expected = process.terminal(0.0).b.dense(N)
    torch.testing.assert_close(expected.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert ((seen - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt() + 1e-12).all()


def test_one_time_per_sequence() -> None:
    process = Mixed(Vocab(N, 4), k=0.1)
    x = torch.zeros(2, 5000, dtype=torch.int64)
    z = process.corrupt(x, torch.tensor([0.1, 0.9]), generator=torch.Generator().manual_seed(0))
    kept = (z == x).double().mean(-1)
    assert kept[0] > 0.88 and kept[1] < 0.13


def test_limits_of_the_mixing_ratio() -> None:
    vocab, t = Vocab(N, 4), torch.tensor(TIMES)
    for ours, theirs in [
        (Mixed(vocab, k=0), Masked(vocab)),
        (Mixed(Vocab(N), k=1), Uniform(Vocab(N))),
        (Mixed(vocab, k=1), Uniform(vocab)),
        (Mixed(vocab, k=0.3, mu={4: 0.7}), Mixed(vocab, k=0.3)),
    ]:
        a, b = ours.coefs(t), theirs.coefs(t)
        assert torch.equal(a.b.dense(N), b.b.dense(N))
        assert torch.equal(a.alpha, b.alpha)


def test_gidd_uniform_share_at_half_time() -> None:
    coefs = Gidd(Vocab(N, 4), p_uniform=0.2).coefs(0.5)
    torch.testing.assert_close((N - 1) * coefs.b_tok, torch.tensor(0.2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Vocab(10, 10), "mask_id=10 is outside"),
        (lambda: Vocab(10, -1), "outside the vocabulary"),
        (lambda: Vocab(7.5), "size must be an integer"),  # type: ignore[arg-type]
        (lambda: Mixed(Vocab(10, 9)).corrupt(torch.zeros(1, 2).long(), 1.5), "times must lie in"),
        (
            lambda: Mixed(Vocab(10, 9)).corrupt(torch.zeros(1, 2).long(), torch.nan),
            "times must lie in",
        ),
        (
            lambda: Masked(Vocab(10, 9)).corrupt(torch.zeros(1, 2).long(), float("nan")),
            "times must",
        ),
        (lambda: Mixed(Vocab(10, 9), k=1.5), "k must lie in"),
        (lambda: Mixed(Vocab(10, 9), k=-0.1), "k must lie in"),
        (lambda: Mixed(Vocab(10), k=0.5), "needs a mask"),
        (lambda: Masked(Vocab(10)), "needs a mask"),
        (lambda: Mixed(Vocab(10, 9), k=0.5, mu={9: 0.4}), "sum to 1"),
        (lambda: Mixed(Vocab(10, 9), k=0.5, mu={9: "a"}), "weight of a special token must be a n"),
        (lambda: Mixed(Vocab(10, 9), k=0.5, mu=[9]), "mu takes special tokens to their weights"),  # type: ignore[arg-type]
        (lambda: Mixed(Vocab(2, 1), k=0.5, mu={0: 0.2, 1: 0.3}), "none is left for data"),
        (lambda: LogLinear(eps="a"), "eps must be a number"),  # type: ignore[arg-type]
        (lambda: Polynomial(power=None), "power must be a number"),  # type: ignore[arg-type]
        (lambda: Gidd(Vocab(10, 9), p_uniform=1.0), "p_uniform"),
    ],
)
def test_bad_parameters_are_named(build, says: str) -> None:
    with pytest.raises(UserError, match=says):
        build()


def test_the_mask_is_special_whatever_its_weight() -> None:
    process = Mixed(Vocab(7, 3), k=0.1, mu={5: 0.9})
    assert process.special_ids == (3, 5)
    coefs = process.coefs(0.5)
    torch.testing.assert_close(coefs.b_mask, coefs.b_tok)
    torch.testing.assert_close(coefs.b.dense(7)[5], coefs.b_tok + 0.9 * (1 - coefs.alpha))


def test_times_per_position() -> None:
    process = Mixed(Vocab(N, 4))
    t = torch.tensor([[0.2, 0.9]])
    probs = torch.full((1, 2, N), 1 / N)
    z = torch.tensor([[4, 4]])
    together = process.posterior(probs, z, t / 2, t)
    for i in range(2):
        alone = process.posterior(probs[:, i:][:, :1], z[:, :1], t[:, i] / 2, t[:, i])
        torch.testing.assert_close(together[:, i], alone[:, 0])


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())
def test_coefficients_are_functions_that_torch_can_transform(process: NoiseProcess) -> None:
    """Their derivatives, by differentiating them at many times at once, are those that they come with."""
    t = torch.linspace(0.1, 0.9, 7, dtype=torch.float64)
    slope = torch.func.vmap(torch.func.grad(lambda one: process.coefs(one).alpha))(t)
    torch.testing.assert_close(slope, process.coefs(t).d_alpha)


def test_rounding_takes_no_time_out_of_its_range() -> None:
    x = torch.zeros(1, 3, dtype=torch.int64)
    for t in (1 + 3e-16, -1e-17):
        for process in (PROCESSES["gidd"], PROCESSES["mixed-cosine"]):
            assert process.corrupt(x, t, uniform=torch.rand(1, 3).double()).shape == (1, 3)
