"""log p(continuation | context) of single texts.

For a model of noise it is minus a bound, estimated: the continuation alone is noised, the context stays
clean, and all terms of the bound count, both ends included (see `likelihood.Noised`). The integral is
looked at at `draws` times, on a grid of its own for every question under one random shift; the ends are
drawn `ENDS` times at most. The standard error covers both.

Randomness depends on the seed and on the context: the answers to one question are compared under the same
noise. An autoregressive model's value is exact.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.evaluation.likelihood import Noised, squares
from xdlm.models import Denoiser, run_trunk
from xdlm.noise import NoiseProcess
from xdlm.objective import stratified_times
from xdlm.sampling.grouping import group_rows
from xdlm.training.loss import next_token_nats

#: Draws of the two ends of the bound, which vary little.
ENDS = 4


@dataclass(frozen=True)
class Question:
    """Tokens to be predicted, and those that they follow."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.context + self.continuation


@dataclass(frozen=True)
class Answer:
    """Nats of a continuation, log p or less; `stderr` is 0 where they are exact, and not a number where one
    draw cannot tell. `greedy`: whether the likeliest tokens, put in one after another, are these; only an
    autoregressive model is asked for it."""

    log_p: float
    stderr: float
    greedy: bool


@torch.no_grad()
def conditional_likelihood(
    denoiser: Denoiser,
    process: NoiseProcess | None,
    questions: Sequence[Question],
    *,
    draws: int = 32,
    seed: int = 0,
    batch_tokens: int = 32_768,
    on_done: Callable[[int, int], None] | None = None,
) -> list[Answer]:
    """Answers in the order of the questions; those of similar length go through the model together (of
    equal length, where it takes no padding), which does not change them."""
    if min(draws, batch_tokens) < 1:
        raise UserError("a conditional likelihood needs at least one draw and one token at a time")
    if any(not question.continuation for question in questions):
        raise UserError("there is no continuation to evaluate")
    if process is None and any(not question.context for question in questions):
        raise UserError("an autoregressive model predicts nothing without a token before it")
    answers: dict[int, Answer] = {}
    lengths = [len(question.tokens) for question in questions]
    padded = process is not None and denoiser.takes_padding
    for numbers in group_rows(lengths, batch_tokens, padded=padded):
        part = [questions[number] for number in numbers]
        found = (
            _bounded(denoiser, process, part, draws, seed) if process else _exact(denoiser, part)
        )
        answers |= dict(zip(numbers, found, strict=True))
        if on_done is not None:
            on_done(len(answers), len(questions))
    return [answers[number] for number in range(len(questions))]


def _bounded(
    denoiser: Denoiser, process: NoiseProcess, part: list[Question], draws: int, seed: int
) -> list[Answer]:
    x, free, padding = _tensors(denoiser, part)
    index = torch.tensor([_index(question.context) for question in part], device=x.device)
    noised = Noised(denoiser, process, x, index, seed, free, padding=padding)
    grid = torch.stack(
        [stratified_times(seed, int(i), torch.arange(draws), draws) for i in index.cpu()]
    ).to(x.device)
    integral = torch.stack(
        [noised.integrand(at, i) for i, at in enumerate(grid.unbind(1))], 1
    ).cpu()
    ends = torch.stack([noised.ends(draw) for draw in range(min(ENDS, draws))], 1).cpu()
    return [
        Answer(-float(inner.mean() + outer.mean()), _stderr(inner, outer), greedy=False)
        for inner, outer in zip(integral, ends, strict=True)
    ]


def _stderr(integral: Tensor, ends: Tensor) -> float:
    if len(integral) < 2:
        return math.nan
    return math.sqrt(
        float(squares(integral).mean()) / len(integral) + float(ends.var()) / len(ends)
    )


def _exact(denoiser: Denoiser, part: list[Question]) -> list[Answer]:
    x, free, _ = _tensors(denoiser, part)
    nats = torch.where(free[:, 1:], next_token_nats(denoiser, x), 0.0).sum(1)
    hidden = run_trunk(denoiser, x, torch.zeros(len(x), device=x.device))[:, :-1]
    greedy = [  # row by row: a batch's logits may be more than memory holds
        bool((denoiser.head(row[scored[1:]]).argmax(-1) == tokens[1:][scored[1:]]).all())
        for row, scored, tokens in zip(hidden, free, x, strict=True)
    ]
    return [Answer(-float(n), 0.0, is_greedy) for n, is_greedy in zip(nats, greedy, strict=True)]


def _tensors(denoiser: Denoiser, part: list[Question]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, where they are to be predicted, and where shorter rows have none (None: nowhere); [B, L]."""
    device, longest = denoiser.device, max(len(question.tokens) for question in part)
    rows = [question.tokens + (0,) * (longest - len(question.tokens)) for question in part]
    start, stop = (
        torch.tensor(ends, device=device)[:, None]
        for ends in ([len(q.context) for q in part], [len(q.tokens) for q in part])
    )
    place = torch.arange(longest, device=device)
    padding = place >= stop
    free = (place >= start) & ~padding
    return torch.tensor(rows, device=device), free, padding if bool(padding.any()) else None


def _index(context: tuple[int, ...]) -> int:
    digest = hashlib.sha256(repr(context).encode()).digest()
    return int.from_bytes(digest[:6], "big")
