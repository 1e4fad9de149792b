"""What the measures need of a model, whatever loaded it, and of a screen, whatever draws on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor

from xdlm.config import ProcessConfig, RunConfig
from xdlm.data import Rows
from xdlm.evaluation.likelihood import Likelihood
from xdlm.models import Denoiser
from xdlm.sampling import Trajectory
from xdlm.tokens import TextTokenizer, Tokenizer

#: Told what is done of what there is.
OnProgress = Callable[[int, int], None]
#: Given what is going on, opens a bar for as long as it takes.
Progress = Callable[[str], AbstractContextManager[OnProgress]]


@contextmanager
def unseen(what: str) -> Iterator[OnProgress]:
    """Progress that nobody looks at."""
    yield lambda done, total: None


class Written(Protocol):
    """Texts that a model made, and the largest number of forward passes that one took."""

    @property
    def tokens(self) -> Tensor: ...

    @property
    def text(self) -> list[str]: ...

    @property
    def nfe(self) -> int: ...

    @property
    def trajectory(self) -> Trajectory | None: ...


class Loaded(Protocol):
    """A model of anything, as it was read back."""

    @property
    def denoiser(self) -> Denoiser: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def config(self) -> RunConfig: ...

    @property
    def weights(self) -> str: ...

    @property
    def step(self) -> int: ...


class Subject(Loaded, Protocol):
    """A model of text, as `xdlm.load` gives it."""

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def sampled_as(self) -> ProcessConfig | None: ...

    @property
    def length(self) -> int: ...

    def sample(
        self,
        n: int,
        *,
        steps: int,
        length: int | None,
        seed: int,
        temperature: float,
        top_p: float,
        impl: str,
        batch_tokens: int,
        trajectory: bool,
        on_step: OnProgress | None,
    ) -> Written: ...

    def perplexity_of(
        self,
        rows: Rows,
        *,
        draws: int,
        seed: int,
        batch: int,
        max_rows: int | None,
        on_batch: OnProgress | None,
    ) -> Likelihood: ...
