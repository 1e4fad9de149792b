"""What the server offers, without the web: models by name, and requests in terms of text."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdlm.api import Model, check_writes
from xdlm.blanks import Blanked, BlankRule, make_rules, read_template
from xdlm.errors import UserError, did_you_mean
from xdlm.evaluation import Likelihood
from xdlm.sampling import configure
from xdlm.sampling.confidence import ConfidenceConfig
from xdlm.sampling.constraints import Rules
from xdlm.serve.engine import Engine, Limits, Progress, Request, Ticket, Written

#: Ratios of mixed noise that are remembered.
_MAX_MIXES = 64


@dataclass(frozen=True)
class Bounds:
    """What one request may ask for."""

    max_length: int = 1024
    """Tokens of a text, its prompt included."""
    max_steps: int = 1024
    """Sampling steps."""
    max_n: int = 16
    """Texts, over all prompts of a request."""
    timeout: float = 60.0
    """Seconds until a request that is not finished is given up."""

    @property
    def default_steps(self) -> int:
        """Of a request that does not say."""
        return min(32, self.max_steps)


@dataclass
class Served:
    """A model that answers requests."""

    name: str
    model: Model
    engine: Engine
    bounds: Bounds
    created: int = field(default_factory=lambda: int(time.time()))
    _mixes: dict[float, Model] = field(default_factory=dict)

    @classmethod
    def start(
        cls, name: str, model: Model, bounds: Bounds, limits: Limits, max_batch: int
    ) -> Served:
        check_writes(model.config)
        assert model.process is not None
        engine = Engine(model.denoiser, model.process, limits=limits, max_batch=max_batch)
        return cls(name, model, engine, bounds)

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeError as error:
            raise UserError(
                "the text holds half of a surrogate pair, which is no character"
            ) from error
        return self.model.tokenizer.encode(text)

    def submit(
        self,
        ids: Sequence[int | None],
        how: Mapping[str, Any],
        *,
        n: int,
        seed: int,
        k: float | None = None,
        stop: bool = False,
        rules: Rules | None = None,
        record: bool = False,
        since: float | None = None,
        on_step: Callable[[Progress], None] | None = None,
    ) -> Ticket:
        """Fill the holes of a row, `n` times; `how` are the sampler's settings that were given."""
        if len(ids) > self.bounds.max_length:
            raise UserError(
                f"at most {self.bounds.max_length} tokens at once, prompt included; got {len(ids)}"
            )
        how = {"steps": self.bounds.default_steps, **how}
        if not 1 <= how["steps"] <= self.bounds.max_steps:
            raise UserError(f"steps must lie in 1..{self.bounds.max_steps}, got {how['steps']}")
        model = self.sampled_as(k)
        assert model.process is not None
        return self.engine.submit(
            Request(
                ids, configure(how, model.process), n=n, seed=seed, process=model.process,
                stop_ids=(self.model.tokenizer.eos_id,) if stop else (),
                timeout=self.bounds.timeout, since=since, rules=rules or Rules(), record=record,
                on_step=on_step,
            )
        )  # fmt: skip

    def settles(self, ticket: Ticket) -> bool:
        """Whether a token, once written, stays: then a text can be told before it is finished."""
        request = ticket.request
        if isinstance(request.config, ConfidenceConfig):
            return request.config.k == 0
        assert request.process is not None
        return not request.process.has_uniform_noise

    def template(self, template: str) -> Blanked:
        """Text with holes `<mask:12>` as a row."""
        return read_template(template, self.encode, max_length=self.bounds.max_length)

    def rules(
        self,
        row: Blanked,
        *,
        banned: Sequence[int | str] = (),
        blanks: Sequence[BlankRule | None] = (),
    ) -> Rules:
        """What the holes of a row may hold; what cannot be met is an error."""
        size = self.engine.process.vocab.size
        return make_rules(
            row.holes, self.model.tokenizer, size, self.encode, banned=banned, blanks=blanks
        )

    def text_of(self, written: Written, start: int) -> tuple[str, bool]:
        """The text from position `start` on, and whether the model ended it."""
        ended = written.end < len(written.tokens)
        return self.model.tokenizer.decode(written.tokens[start : written.end].tolist()), ended

    def score(self, text: str, *, draws: int, seed: int) -> Likelihood:
        """Called in the engine's thread."""
        rows = self.model.pack([text])
        return self.model.perplexity_of(rows, draws=draws, seed=seed)

    def sampled_as(self, k: float | None) -> Model:
        """The model, or one of mixed noise of a ratio; that is made once, so that its times and
        coefficients are too."""
        if k is None:
            return self.model
        if k not in self._mixes:
            if len(self._mixes) >= _MAX_MIXES:
                self._mixes.pop(next(iter(self._mixes)))
            self._mixes[k] = self.model.mixed(k)
        return self._mixes[k]


class Service:
    """All models of a server; the first is meant where none is named."""

    def __init__(self, served: Sequence[Served], bounds: Bounds) -> None:
        self.served = {one.name: one for one in served}
        self.bounds = bounds

    def find(self, name: str | None) -> Served:
        if name is None:
            return next(iter(self.served.values()))
        if name not in self.served:
            raise UnknownModel(f"no model '{name}' here{did_you_mean(name, self.served)}")
        return self.served[name]

    @property
    def alive(self) -> bool:
        return all(one.engine.alive for one in self.served.values())

    def close(self, *, drain: bool, timeout: float | None = None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        for one in self.served.values():
            left = None if until is None else max(0.0, until - time.monotonic())
            one.engine.close(drain=drain, timeout=left)


class UnknownModel(UserError):
    """A model that this server does not have."""


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of some strings, and whether one was found."""
    if not stops:
        return text, False
    found = re.search("|".join(map(re.escape, stops)), text)
    return (text[: found.start()], True) if found else (text, False)


def new_seed() -> int:
    """For those who did not ask for one; it goes into the answer, so that it can be asked for."""
    return secrets.randbits(31)
