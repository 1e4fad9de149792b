"""How answers are written, and what that asks of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Unpack, cast

from xdlm.data import Rows
from xdlm.errors import UserError
from xdlm.evaluation.subject import OnProgress, Subject
from xdlm.noise import NoiseProcess
from xdlm.sampling import How
from xdlm.sampling.writing import BATCH_TOKENS


class Completed(Protocol):
    """What follows a prompt."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def stopped(self) -> bool: ...

    @property
    def nfe(self) -> int: ...


class Responding(Subject, Protocol):
    """A model that can be asked, as `xdlm.load` gives it."""

    @property
    def process(self) -> NoiseProcess | None: ...

    def pack(self, texts: list[str]) -> Rows: ...

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        seed: int,
        index: Sequence[int],
        stop_ids: Sequence[int],
        batch_tokens: int,
        on_step: OnProgress,
        **how: Unpack[How],
    ) -> Sequence[Completed]: ...


@dataclass(frozen=True)
class WriterSettings:
    """How answers are written."""

    sampler: str = "ancestral"
    """ancestral or confidence."""
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
    batch_tokens: int = BATCH_TOKENS
    """Tokens of prompts and answers that go through the model at a time."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the sampler alone understands, by name."""

    def __post_init__(self) -> None:
        if min(self.length, self.batch_tokens) < 1 or self.seed < 0:
            raise UserError("length and batch_tokens must be at least 1, and the seed not negative")

    @property
    def how(self) -> How:
        """As samplers take it."""
        shared = ("sampler", "steps", "temperature", "top_p")
        return cast(How, {name: getattr(self, name) for name in shared} | dict(self.options))
