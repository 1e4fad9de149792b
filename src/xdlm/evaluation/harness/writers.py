"""How a model writes on from prompts: one function per sampler, by name.

A writer takes the model, the prompts' tokens, a number for each prompt that its randomness depends on, and
the settings; it gives back what follows each prompt. It never touches a prompt, and how prompts are put
into batches does not change what it writes. A new sampler is one function and one line in `WRITERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from xdlm.data import Rows
from xdlm.errors import UserError, did_you_mean
from xdlm.evaluation.conditional import batches_of
from xdlm.evaluation.subject import OnProgress, Subject
from xdlm.noise import NoiseProcess
from xdlm.sampling import Filter, SamplerConfig, sample

Prompts = Sequence[Sequence[int]]


class Responding(Subject, Protocol):
    """A model that can be asked: one with its noise process, if it has one, and its rule of packing."""

    @property
    def process(self) -> NoiseProcess | None: ...

    def pack(self, texts: list[str]) -> Rows: ...


@dataclass(frozen=True)
class WriterSettings:
    """How answers are written."""

    sampler: str = "ancestral"
    """By name, one of WRITERS."""
    steps: int = 32
    """Sampling steps; the ancestral sampler's final denoise comes on top."""
    length: int = 256
    """Tokens of an answer."""
    temperature: float = 0.0
    """0 takes the most likely token of every prediction."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens that holds this probability."""
    seed: int = 0
    """Decides every draw."""
    batch: int = 16
    """Prompts that go through the model at a time."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What a sampler alone understands, by name."""

    def __post_init__(self) -> None:
        if self.sampler not in WRITERS:
            raise UserError(
                f"unknown sampler '{self.sampler}'{did_you_mean(self.sampler, WRITERS)}"
            )
        if self.length < 1 or self.batch < 1 or self.seed < 0:
            raise UserError("length and batch must be at least 1, and the seed not negative")
        SamplerConfig(self.steps, Filter(self.temperature, self.top_p))


@dataclass(frozen=True)
class Continuation:
    """What follows a prompt, and the forward passes that it took."""

    tokens: list[int]
    nfe: float


def ancestral(
    model: Responding,
    prompts: Prompts,
    index: Sequence[int],
    settings: WriterSettings,
    on_done: OnProgress,
) -> list[Continuation]:
    """The exact reverse process, with the prompt frozen."""
    if settings.options:
        raise UserError(f"the ancestral sampler has no option '{next(iter(settings.options))}'")
    if model.process is None:
        raise UserError("this model is autoregressive: it judges texts, but it writes none")
    config = SamplerConfig(settings.steps, Filter(settings.temperature, settings.top_p))
    found: dict[int, Continuation] = {}
    for numbers in batches_of([len(prompt) for prompt in prompts], settings.batch):
        before = len(prompts[numbers[0]])
        holes = [0] * settings.length
        given = torch.tensor([[*prompts[number], *holes] for number in numbers])
        frozen = (torch.arange(given.shape[1]) < before).expand(given.shape)
        out = sample(
            model.denoiser, model.process, batch=len(numbers), length=given.shape[1], config=config,
            seed=settings.seed, index=torch.tensor([index[number] for number in numbers]),
            given=given, frozen=frozen,
        )  # fmt: skip
        assert torch.equal(out.tokens[:, :before].cpu(), given[:, :before]), (
            "a prompt was rewritten"
        )
        for number, row, nfe in zip(numbers, out.tokens.cpu(), out.nfe, strict=True):
            found[number] = Continuation(row[before:].tolist(), float(nfe))
        on_done(len(found), len(prompts))
    return [found[number] for number in range(len(prompts))]


Writer = Callable[
    [Responding, Prompts, Sequence[int], WriterSettings, OnProgress], list[Continuation]
]
WRITERS: dict[str, Writer] = {"ancestral": ancestral}
