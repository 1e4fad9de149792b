"""The Monte-Carlo bound: right on a known law, and honest about its error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_sampling import Oracle

from xdlm import UserError, Vocab
from xdlm.data import Rows, TokensInMemory
from xdlm.evaluation import likelihood, row_bounds
from xdlm.evaluation.likelihood import summarise
from xdlm.noise import Gidd, Masked, Mixed, Uniform
from xdlm.objective import nelbo, step_kl, step_kl_between
from xdlm.ops import Stream, uniform

LAW = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
ENTROPY = float(-(LAW * LAW.log()).sum())


def rows_of(n: int, length: int, tail: int = 0) -> Rows:
    """Independent tokens of a known law, each character a token."""
    generator = np.random.default_rng(0)
    tokens = generator.choice(5, size=n * length + tail, p=LAW.numpy()).astype(np.uint16)
    return Rows(TokensInMemory(tokens, len(tokens), 1), length)


def all_about(process) -> Oracle:
    law = torch.zeros(process.vocab.size, dtype=torch.float64)
    law[:5] = LAW
    return Oracle(lambda z, t: law.log().clamp_min(-80).float().expand(*z.shape, -1), len(law))


@pytest.mark.parametrize("process", [
    Masked(Vocab(6, 5)), Mixed(Vocab(6, 5), k=0.1), Mixed(Vocab(6, 5), k=0.9), Uniform(Vocab(5)),
    Gidd(Vocab(6, 5)),
], ids=["masked", "mixed-0.1", "mixed-0.9", "uniform", "gidd"])  # fmt: skip
def test_bound_equals_the_entropy_of_a_known_law(process) -> None:
    """With the ideal prediction the bound is tight, so it must come out at the entropy of the very
    tokens that were drawn, within its own standard error."""
    rows = rows_of(60, 200, tail=37)
    result = likelihood(all_about(process), process, rows, draws=4, batch=20, seed=1)
    every = rows.stream.read(0, rows.n_tokens)
    truth = float(-LAW.log()[torch.from_numpy(every.astype(np.int64))].mean())
    assert result.n_tokens == 60 * 200 + 37 and result.n_rows == 61
    assert abs(result.nats_per_token - truth) < 4 * result.nats_stderr
    assert result.nats_stderr < 0.06
    assert result.value == pytest.approx(math.exp(result.nats_per_token))
    assert result.bits_per_character == pytest.approx(result.nats_per_token / math.log(2))


def test_result_does_not_depend_on_batches_but_on_the_seed() -> None:
    process, rows = Mixed(Vocab(6, 5)), rows_of(37, 50, tail=9)
    one, *others = (
        likelihood(all_about(process), process, rows, batch=batch, seed=2) for batch in (1, 7, 40)
    )
    for other in others:
        assert other.value == pytest.approx(one.value, rel=1e-6)
        assert other.stderr == pytest.approx(one.stderr, rel=1e-6)
    assert likelihood(all_about(process), process, rows, batch=4, seed=3).value != one.value


def test_models_share_their_noise_and_texts_do_not() -> None:
    """Differences of models on one text are not noise; the errors of two texts are independent."""
    process, seen = Mixed(Vocab(6, 5)), []
    model = all_about(process)
    trunk = model.trunk
    model.trunk = lambda z, t, label=None: seen.append((z, t)) or trunk(z, t, label)
    for rows in (rows_of(6, 30), rows_of(6, 30), rows_of(6, 30, tail=1)):
        likelihood(model, process, rows, draws=1, batch=6, seed=1, max_rows=6)
    first, again, other = (seen[3 * i][1] for i in range(3))
    assert torch.equal(first, again) and not torch.isclose(first, other).any()


def test_averages_are_over_tokens_not_rows() -> None:
    long, short = torch.full((2, 1), 100.0).double(), torch.full((1, 1), 10.0).double()
    result = summarise([long, short], [50, 5], seed=0, n_characters=None)
    assert result.nats_per_token == pytest.approx(2.0)
    assert result.value == pytest.approx(math.exp(2.0))
    assert (result.n_rows, result.n_tokens, result.nats_stderr) == (3, 105, 0)


def test_single_row_takes_its_error_from_the_draws() -> None:
    process = Mixed(Vocab(6, 5))
    result = likelihood(all_about(process), process, rows_of(0, 10, tail=9), draws=8)
    assert result.n_rows == 1 and 0 < result.nats_stderr < 2


def test_max_rows_leaves_the_tail_out() -> None:
    process = Masked(Vocab(6, 5))
    result = likelihood(all_about(process), process, rows_of(5, 20, tail=7), max_rows=3)
    assert (result.n_rows, result.n_tokens, result.bits_per_character) == (3, 60, None)
    with pytest.raises(UserError, match="no text"):
        likelihood(all_about(process), process, rows_of(0, 20), draws=1)


@pytest.mark.parametrize("cls", [Masked, Mixed, Gidd])
def test_bound_has_all_its_terms(cls) -> None:
    """Over a short stretch of time the two ends are most of the bound. Each term is taken from the
    dense-logits losses here, on the same noise: none may be missing, none counted twice."""
    process = cls(Vocab(6, 5))
    process.time_range = (0.2, 0.7)
    oracle = all_about(process)
    x, index, draws = torch.randint(0, 5, (3, 40)), torch.tensor([4, 0, 9]), 2
    grid = torch.rand(3, draws, dtype=torch.float64)
    computed = row_bounds(oracle, process, x, index, grid, seed=6)
    position = torch.arange(40)[None]

    def logits_of(z):
        return oracle(z, torch.zeros(3)).double()

    def noisy(coefs, step):
        u = uniform(6, Stream.CORRUPT, index[:, None], position, step)
        return process.corrupt_with(coefs, x, u)

    zero = torch.zeros(3, dtype=torch.float64)
    z_start, z_end = (
        noisy(process.terminal(zero), 1 << 30),
        noisy(process.coefs(zero + 0.2), (1 << 30) + 1),
    )
    start = step_kl_between(
        process, process.coefs(zero + 0.7), process.terminal(zero), logits_of(z_start), x, z_start
    )
    end = step_kl(process, logits_of(z_end), x, z_end, 0.0, 0.2)
    for draw, even in enumerate(grid.unbind(1)):
        t = 0.2 + 0.5 * torch.sin(math.pi * even / 2) ** 2
        z = noisy(process.coefs(t), draw)
        rate = 0.25 * math.pi * torch.sin(math.pi * even)  # dt/du
        integral = nelbo(process, logits_of(z), x, z, t).sum(1) * rate
        expected = start.sum(1) + integral + end.sum(1)
        torch.testing.assert_close(computed[:, draw], expected, rtol=1e-5, atol=1e-5)
        assert (start.sum(1) + end.sum(1) > 0.2 * expected).all()


@pytest.mark.parametrize(
    "bad", [{"draws": 0}, {"batch": 0}, {"max_rows": -3}, {"max_rows": 0}, {"seed": -1}]
)
def test_bad_settings(bad: dict) -> None:
    process = Masked(Vocab(6, 5))
    with pytest.raises(UserError):
        likelihood(all_about(process), process, rows_of(2, 20), **bad)
