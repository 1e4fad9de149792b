"""What the server offers, without the web: models by name, and requests in terms of text."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdlm.api import Model, check_writes
from xdlm.blanks import Blanked, BlankRule, make_rules, read_template
from xdlm.data import Rows
from xdlm.errors import UserError, did_you_mean
from xdlm.evaluation import Likelihood, likelihood_by_passes
from xdlm.sampling import configure
from xdlm.sampling.confidence import ConfidenceConfig
from xdlm.sampling.constraints import Rules
from xdlm.serve.automata import Automata
from xdlm.serve.engine import Engine, Limits
from xdlm.serve.requests import Progress, Request, Ticket, Written
from xdlm.serve.workers import Check, Workers

#: Ratios of mixed noise that are remembered.
_MAX_MIXES = 64
#: Passes through the model that a score takes beside its draws.
_END_PASSES = 2


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
    max_score: int = 1 << 18
    """Tokens that go through the model to score texts: each of them, for every draw and for both ends of
    the bound."""

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

    def __post_init__(self) -> None:
        self.automata = Automata(self.model.tokenizer, self.engine.process.vocab.size)

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
                "the text holds half of a surrogate pair, which is not a character"
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
        n: int,
        check: Check,
    ) -> Rules:
        """What the holes of a row may hold that is written `n` times; what cannot be met is an error.
        `check` is called often, and raises to stop it."""
        return make_rules(
            row.holes, self.model.tokenizer, self.automata.size, self.encode, banned=banned,
            blanks=blanks, compiled=self.automata.compiler(n=n, check=check),
        )  # fmt: skip

    def text_of(self, written: Written, start: int) -> tuple[str, bool]:
        """The text from position `start` on, and whether the model ended it."""
        ended = written.end < len(written.tokens)
        return self.model.tokenizer.decode(written.tokens[start : written.end].tolist()), ended

    def pack_to_score(self, texts: Sequence[str], *, draws: int) -> list[Rows]:
        """Each text as rows; too much is an error."""
        lengths = [len(self.encode(text)) for text in texts]
        most = self.bounds.max_length
        for length in lengths:
            if not 1 <= length <= most:
                raise UserError(f"a text to score has 1 to {most} tokens, got {length}")
        cost = sum(lengths) * (draws + _END_PASSES)
        if cost > self.bounds.max_score:
            raise UserError(
                f"at most {self.bounds.max_score:,} tokens through the model for one score, and "
                f"{sum(lengths):,} tokens with {draws} draws take {cost:,}; ask for less at once"
            )
        return [self.model.pack([text]) for text in texts]

    def score(
        self, texts: Sequence[Rows], *, draws: int, seed: int
    ) -> Generator[None, None, list[Likelihood]]:
        """For the engine's thread: a pass through the model at a time."""
        found = []
        for rows in texts:
            found.append(
                (
                    yield from likelihood_by_passes(
                        self.model.denoiser, self.model.process, rows, draws=draws, seed=seed,
                        batch=self.engine.batcher.max_batch,
                    )
                )
            )  # fmt: skip
        return found

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
        #: What compiles patterns, and what draws films: apart, since either may keep a core busy.
        self.compiling = Workers("xdlm-patterns", threads=2, waiting=16)
        self.drawing = Workers("xdlm-films", threads=1, waiting=16)

    def find(self, name: str | None) -> Served:
        if name is None:
            return next(iter(self.served.values()))
        if name not in self.served:
            raise UnknownModel(f"no model '{name}' here{did_you_mean(name, self.served)}")
        return self.served[name]

    @property
    def alive(self) -> bool:
        return all(one.engine.alive for one in self.served.values())

    def give_up(self) -> None:
        """Take no new requests; those who wait for an answer are told at once that none will come."""
        for workers in (self.compiling, self.drawing):
            workers.close()
        for one in self.served.values():
            one.engine.give_up()

    def close(self) -> None:
        """The same, and wait until the engines have stopped."""
        self.give_up()
        for one in self.served.values():
            one.engine.close(drain=False)


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
