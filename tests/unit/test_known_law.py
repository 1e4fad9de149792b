"""A language whose law is known: what the bound must come out at, and how honest its error is.

The language is a Markov chain, so that tokens depend on each other and the ideal denoiser can be had
by the forward-backward algorithm. Ideal is `x~_i = p(x_i | z_j, j != i)`: what the *other* positions say.
With it the rates of the model's reverse process are those of the true one,

    p_t(z')/p_t(z) = f_t(x~_i, z'_i)/f_t(x~_i, z_i)     for z, z' that differ at i alone,

so the continuous-time bound equals -log p(x) for every x, but for the finite steps at its two ends, which
cost about the square of their length. In T finite steps positions move together and independently of each
other, which costs about 1/T.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from test_sampling import Oracle
from torch import Tensor

from xdlm import Vocab
from xdlm.data import Rows, TokensInMemory
from xdlm.evaluation import Likelihood, likelihood
from xdlm.evaluation.likelihood import bent_times
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform
from xdlm.objective import bound_ends, nelbo, step_kl_between
from xdlm.structs import Coefs

FIRST = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
NEXT = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.2, 0.7], [0.3, 0.6, 0.1]], dtype=torch.float64)
SIZE = len(FIRST)

PROCESSES = {
    "masked": Masked(Vocab(SIZE + 1, SIZE)),
    "uniform": Uniform(Vocab(SIZE)),
    "mixed": Mixed(Vocab(SIZE + 1, SIZE), k=0.1),
    "gidd": Gidd(Vocab(SIZE + 1, SIZE)),
}
every_method = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())


def entropy(length: int) -> float:
    """Nats of a sequence: of its first token, and of each one after it given the one before."""
    law, total = FIRST, float(-(FIRST * FIRST.log()).sum())
    for _ in range(length - 1):
        total -= float(law @ (NEXT * NEXT.log()).sum(1))
        law = law @ NEXT
    return total


def draw(n: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Sequences by the inverse of the cumulative law."""
    x = np.empty((n, length), dtype=np.int64)
    law = np.broadcast_to(FIRST.numpy(), (n, SIZE))
    for i in range(length):
        x[:, i] = (generator.random((n, 1)) > law.cumsum(1)[:, :-1]).sum(1)
        law = NEXT.numpy()[x[:, i]]
    return x


def ideal(process: NoiseProcess, coefs: Coefs, z: Tensor, *, own: bool = False) -> Tensor:
    """log p(x_i | z_j, j != i) over the vocabulary [B, L, N], by forward-backward; with `own`, given
    z_i too."""
    seen = coefs.b.at(z)[..., None] + coefs.alpha[:, None, None] * (
        z[..., None] == torch.arange(SIZE)
    )
    length = z.shape[1]
    before, after = [FIRST.expand(len(z), -1)], [torch.ones(len(z), SIZE, dtype=torch.float64)]
    for i in range(length - 1):
        step = (before[-1] * seen[:, i]) @ NEXT
        before.append(step / step.sum(1, keepdim=True))
        step = (after[-1] * seen[:, length - 1 - i]) @ NEXT.T
        after.append(step / step.sum(1, keepdim=True))
    law = torch.stack(before, 1) * torch.stack(after[::-1], 1) * (seen if own else 1)
    log_p = (law / law.sum(-1, keepdim=True)).log().clamp_min(-80)
    return torch.nn.functional.pad(log_p, (0, process.vocab.size - SIZE), value=-80.0)


def oracle(process: NoiseProcess) -> Oracle:
    """The ideal denoiser as a model. Evaluation asks for time 1 where it has put in pure noise."""
    assert process.time_range[0] > 0

    def log_probs(z: Tensor, t: Tensor) -> Tensor:
        coefs = process.terminal(t.double()) if bool((t == 1).all()) else process.coefs(t.double())
        return ideal(process, coefs, z).float()

    return Oracle(log_probs, process.vocab.size)


class Exact:
    """Expectations over all pairs (x, z) of short sequences, at many times at once."""

    def __init__(self, process: NoiseProcess, length: int, *, own: bool = False) -> None:
        self.process, self.own = process, own
        ids = [torch.arange(SIZE)] * length + [torch.arange(process.vocab.size)] * length
        pairs = torch.cartesian_prod(*ids)
        self.x, self.z = pairs[:, :length], pairs[:, length:]
        self.law = FIRST[self.x[:, 0]] * NEXT[self.x[:, :-1], self.x[:, 1:]].prod(1)

    def mean(self, coefs: Coefs, loss) -> Tensor:
        """E of the loss at every entry of coefs, [T]. `loss` maps (entry of each row, logits, x, z), rows
        being entries times pairs, to [rows, L]."""
        n, pairs = len(coefs.alpha), len(self.x)
        x, z = self.x.repeat(n, 1), self.z.repeat(n, 1)
        entry = torch.arange(n).repeat_interleave(pairs)
        noisy = coefs.index(entry)
        weight = self.law.repeat(n) * noisy.of((x == z).double(), z).prod(1)
        logits = ideal(self.process, noisy, z, own=self.own)
        terms = torch.where(weight > 0, weight * loss(entry, logits, x, z).sum(1), 0.0)
        return terms.view(n, pairs).sum(1)

    def continuous(self) -> float:
        """start + integral + end, at the midpoints of a grid that is bent twice towards both ends of
        time, where GIDD's rates are all but singular."""
        process = self.process
        even = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
        bent, inner = bent_times(even, (0.0, 1.0))
        t, outer = bent_times(bent, process.time_range)
        integrand = self.mean(
            process.coefs(t), lambda entry, *about: nelbo(process, *about, t[entry])
        )
        total = (integrand * inner * outer).mean()
        return float(total) + sum(
            self.step(end.noisy, end.target) for end in bound_ends(process, torch.zeros(1))
        )

    def in_steps(self, steps: int) -> float:
        """The objective of T equal steps, from pure noise to the data."""
        t = torch.arange(1, steps, dtype=torch.float64) / steps
        total = sum(
            self.step(self.process.coefs(part), self.process.coefs(part - 1 / steps))
            for part in t.split(200)
        )
        last = self.process.coefs(torch.tensor([1 - 1 / steps], dtype=torch.float64))
        return total + self.step(self.process.terminal(torch.zeros(1).double()), last)

    def step(self, noisy: Coefs, target: Coefs) -> float:
        """Sum of the expected costs of finite steps from `noisy` to `target`."""

        def cost(entry: Tensor, logits: Tensor, x: Tensor, z: Tensor) -> Tensor:
            at_s, at_t = target.index(entry), noisy.index(entry)
            return step_kl_between(self.process, at_s, at_t, logits, x, z)

        return float(self.mean(noisy, cost).sum())


@every_method
def test_continuous_time_bound_is_tight(process: NoiseProcess) -> None:
    """No sampling here: all sequences of three tokens, all that noise can make of them."""
    assert Exact(process, 3).continuous() == pytest.approx(entropy(3), rel=2e-5)


@every_method
def test_the_ideal_prediction_leaves_its_own_position_out(process: NoiseProcess) -> None:
    """Given z_i as well, a posterior counts twice what z_i says: the bound is loose, unless z_i says
    nothing wherever there is a cost (masked noise)."""
    excess = Exact(process, 2, own=True).continuous() - entropy(2)
    if process.has_uniform_noise:
        assert excess > 0.005
    else:
        assert abs(excess) < 1e-5


@every_method
def test_many_steps_become_continuous_time(process: NoiseProcess) -> None:
    """What T = 10, 100, 1000 steps cost beyond continuous time falls like 1/T."""
    law = Exact(process, 2)
    limit = law.continuous()
    excess = [law.in_steps(steps) - limit for steps in (10, 100, 1000)]
    assert 0.001 < excess[0] < 0.2
    for coarse, fine in pairwise(excess):
        assert 8 < coarse / fine < 12, excess


def measured(process: NoiseProcess, seed: int, n: int, length: int = 24) -> Likelihood:
    """The library's estimate from fresh text and fresh noise."""
    tokens = draw(n, length, np.random.default_rng([seed, n])).astype(np.uint16).ravel()
    rows = Rows(TokensInMemory(tokens, tokens.size, n), length)
    return likelihood(oracle(process), process, rows, draws=4, batch=100, seed=seed)


@every_method
def test_perplexity_is_within_two_standard_errors_of_the_truth(process: NoiseProcess) -> None:
    result = measured(process, seed=0, n=1000)
    truth = entropy(24) / 24
    assert abs(result.nats_per_token - truth) < 2 * result.nats_stderr
    assert abs(result.value - math.exp(truth)) < 2 * result.stderr
    assert result.nats_stderr < 0.02


#: Quantiles of chi-square with 49 degrees of freedom at 0.0005 and 0.9995.
CHI_SQUARE_49 = (22.8, 88.2)


@every_method
def test_standard_error_is_calibrated(process: NoiseProcess) -> None:
    """Fifty times anew: the results spread as they say they do, two standard errors hold the truth as
    often as they should (95 %; fewer than 42 of fifty happens once in a thousand times), and their
    mean, seven times as exact, is not off to one side."""
    results = [measured(process, seed=seed, n=200) for seed in range(1, 51)]
    nats = np.array([r.nats_per_token for r in results])
    stated = np.array([r.nats_stderr for r in results])
    low, high = CHI_SQUARE_49
    assert low < 49 * nats.var(ddof=1) / np.mean(stated**2) < high
    truth = entropy(24) / 24
    assert (np.abs(nats - truth) < 2 * stated).sum() >= 42
    assert abs(nats.mean() - truth) < 3 * np.sqrt(np.mean(stated**2) / 50)


@every_method
def test_standard_error_of_a_few_rows(process: NoiseProcess) -> None:
    """Eight rows: less is known of the error itself, but it is of the right size."""
    results = [measured(process, seed=seed, n=8) for seed in range(1, 51)]
    spread = np.var([r.nats_per_token for r in results], ddof=1)
    stated = np.mean([r.nats_stderr**2 for r in results])
    assert 0.4 < spread / stated < 2.5
    truth = entropy(24) / 24
    assert sum(abs(r.nats_per_token - truth) < 2 * r.nats_stderr for r in results) >= 38
