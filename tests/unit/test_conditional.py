"""log p(continuation | context): right on known laws, honest about its error, exact for causal models."""

from __future__ import annotations

import math

import pytest
import torch
from test_likelihood import LAW
from test_next_token import awake
from test_sampling import Oracle

from xdlm import UserError, Vocab
from xdlm.evaluation.conditional import Question, conditional_likelihood
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform
from xdlm.training.loss import next_token_nats

PROCESSES = {
    "masked": Masked(Vocab(6, 5)),
    "mixed-0.1": Mixed(Vocab(6, 5), k=0.1),
    "mixed-0.9": Mixed(Vocab(6, 5), k=0.9),
    "uniform": Uniform(Vocab(5)),
    "gidd": Gidd(Vocab(6, 5)),
}
every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)


CONTEXT = 6


def told_by_the_first(process: NoiseProcess) -> Oracle:
    """Tokens are independent, of a law that the first token of the context turns around; a context that is
    not what it was would be noticed."""

    def log_probs(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        assert (z[:, :CONTEXT] < 5).all(), "the context is never masked"
        assert (z[:, 1] == 4).all(), "nor changed"
        law = torch.zeros(len(z), process.vocab.size, dtype=torch.float64)
        law[:, :5] = torch.stack([LAW.roll(int(first)) for first in z[:, 0]])
        return law.log().clamp_min(-80).float()[:, None].expand(*z.shape, -1)

    return Oracle(log_probs, process.vocab.size)


def context(number: int, first: int | None = None) -> tuple[int, ...]:
    """Another one for every number."""
    digits = tuple(number // 5**place % 5 for place in range(CONTEXT - 2))
    return (number % 5 if first is None else first, 4, *digits)


def truth(question: Question) -> float:
    law = LAW.roll(question.context[0])
    return float(law.log()[list(question.continuation)].sum())


@every_process
def test_bound_is_tight_for_the_ideal_prediction(process: NoiseProcess) -> None:
    """It counts the continuation alone, every term of its bound, and sees the context clean."""
    generator = torch.Generator().manual_seed(0)
    questions = [
        Question(context(i), tuple(torch.randint(0, 5, (n,), generator=generator).tolist()))
        for i, n in enumerate([1, 3, 20] * 20)
    ]
    found = conditional_likelihood(told_by_the_first(process), process, questions, draws=64)
    off = sum(a.log_p - truth(q) for a, q in zip(found, questions, strict=True))
    error = math.hypot(*(answer.stderr for answer in found))
    assert abs(off) < 3 * error < 60  # of 600 nats


@every_process
def test_error_is_calibrated(process: NoiseProcess) -> None:
    """Sixty times the same question, under contexts that tell the same and give other noise."""
    continuation = (0, 1, 2, 3, 4, 0, 0, 1)
    questions = [Question(context(i, first=2), continuation) for i in range(60)]
    found = conditional_likelihood(told_by_the_first(process), process, questions, draws=16)
    spread = torch.tensor([answer.log_p for answer in found]).std()
    claimed = torch.tensor([answer.stderr**2 for answer in found]).mean().sqrt()
    assert 0.65 < claimed / spread < 1.5


def test_batches_do_not_matter_and_one_context_has_one_noise() -> None:
    process = PROCESSES["mixed-0.1"]
    oracle = told_by_the_first(process)
    questions = [Question(context(i), (i, 1, 2)) for i in range(5)] + [Question(context(0), (1,))]
    apart, together = (
        conditional_likelihood(oracle, process, questions, draws=8, batch_tokens=tokens)
        for tokens in (1, 1000)
    )
    for one, other in zip(apart, together, strict=True):
        assert one.log_p == pytest.approx(other.log_p, abs=1e-5)
    twice = conditional_likelihood(oracle, process, [questions[0]] * 2, draws=8)
    assert twice[0] == twice[1]
    other = conditional_likelihood(oracle, process, [questions[0]], draws=8, seed=1)
    assert other[0].log_p != twice[0].log_p


def test_one_draw_claims_no_error() -> None:
    process = PROCESSES["masked"]
    found = conditional_likelihood(
        told_by_the_first(process), process, [Question(context(0), (1,))], draws=1
    )
    assert math.isnan(found[0].stderr)


def test_a_causal_model_is_exact() -> None:
    """The chain rule: a text's log-likelihood is that of its parts, one after another."""
    model = awake()
    tokens = tuple(torch.randint(0, 20, (9,), generator=torch.Generator().manual_seed(1)).tolist())
    whole, first, second = conditional_likelihood(model, None, [
        Question(tokens[:1], tokens[1:]), Question(tokens[:1], tokens[1:5]),
        Question(tokens[:5], tokens[5:]),
    ])  # fmt: skip
    assert whole.log_p == pytest.approx(first.log_p + second.log_p, abs=1e-5)
    nats = float(next_token_nats(model, torch.tensor([tokens])).detach().sum())
    assert whole.log_p == pytest.approx(-nats, abs=1e-5) and whole.stderr == 0


def test_a_causal_model_says_what_is_greedy() -> None:
    model = awake()
    tokens = [3]
    for _ in range(4):
        logits = model(torch.tensor([tokens]), torch.zeros(1))[0, -1]
        tokens.append(int(logits.argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % 20]
    likeliest, less = conditional_likelihood(
        model, None, [Question((3,), tuple(t[1:])) for t in (tokens, other)]
    )
    assert likeliest.greedy and not less.greedy


def test_bad_questions() -> None:
    model = awake()
    with pytest.raises(UserError, match="no continuation"):
        conditional_likelihood(model, None, [Question((1,), ())])
    with pytest.raises(UserError, match="without a token before"):
        conditional_likelihood(model, None, [Question((), (1,))])
    with pytest.raises(UserError, match="at least one draw"):
        conditional_likelihood(model, None, [Question((1,), (1,))], draws=0)
