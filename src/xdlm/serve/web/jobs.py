"""What a request asks the engine for: its rows, their tickets, and what a finished row is to the client."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from xdlm.blanks import BlankRule, force
from xdlm.errors import UserError
from xdlm.sampling.constraints import Rules
from xdlm.serve.requests import Progress, Ticket, Written
from xdlm.serve.service import Service, cut, new_seed
from xdlm.serve.web.bodies import Completion, Holes, Infill, Sampling
from xdlm.serve.web.streams import Clock
from xdlm.serve.workers import Check

B = TypeVar("B", bound=Sampling)
Watch = Callable[[int], Callable[[Progress], None] | None]


class Asked(NamedTuple):
    """A row with its holes, where the text that the client gets begins in it, and what it may hold."""

    ids: list[int | None]
    start: int
    rules: Rules


class Job(ABC, Generic[B]):
    """A request for texts, with its clock running."""

    kind: ClassVar[str]

    def __init__(self, service: Service, body: B) -> None:
        self.clock = Clock(service.bounds.timeout)
        self.service = service
        self.one = service.find(body.model)
        self.body = body
        self.seed = new_seed() if body.seed is None else body.seed
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": self.kind, "created": int(time.time()),
            "model": self.one.name,
        }  # fmt: skip
        n = body.n * self.n_rows()
        if n > service.bounds.max_n:
            raise UserError(f"at most {service.bounds.max_n} texts in one request, got {n}")

    @abstractmethod
    def n_rows(self) -> int:
        """Prompts or templates, each of which is written `n` times."""

    @abstractmethod
    def rows(self, check: Check) -> list[Asked]:
        """As tokens. It may take a while: not in the event loop. Where there are patterns, `check` is
        called often, and raises once nobody waits."""

    @property
    def has_patterns(self) -> bool:
        return False

    @abstractmethod
    def choice(self, number: int, asked: Asked, row: int, written: Written) -> dict[str, Any]:
        """A finished text as the client gets it: the `row`-th of the `number`-th prompt or template."""

    @property
    def stops(self) -> bool:
        """Whether the model may end a text."""
        return False

    @property
    def records(self) -> bool:
        """Whether every step is kept."""
        return False

    def settled(self, asked: Asked, ticket: Ticket, progress: Progress, told: str) -> str:
        """What can be told of a text that is not finished, beyond what was told."""
        return ""

    def submit(self, rows: Sequence[Asked], watch: Watch) -> list[Ticket]:
        """A ticket for each row, or an error and none; `watch` says who is told of a row's steps."""
        tickets: list[Ticket] = []
        try:
            for number, asked in enumerate(rows):
                tickets.append(
                    self.one.submit(
                        asked.ids, self.body.how(), n=self.body.n, seed=self.seed, k=self.body.k,
                        stop=self.stops, rules=asked.rules, record=self.records,
                        since=self.clock.began, on_step=watch(number),
                    )
                )  # fmt: skip
        except Exception:
            for ticket in tickets:
                ticket.cancel()
            raise
        return tickets


class CompletionJob(Job[Completion]):
    """Texts behind prompts."""

    kind = "text_completion"

    @property
    def stops(self) -> bool:
        return True

    def n_rows(self) -> int:
        return len(self.body.prompts())

    def rows(self, check: Check) -> list[Asked]:
        room = min(self.body.max_tokens, self.one.bounds.max_length + 1)
        prompts = [self.one.encode(prompt) for prompt in self.body.prompts()]
        return [Asked([*ids, *[None] * room], len(ids), Rules()) for ids in prompts]

    def choice(self, number: int, asked: Asked, row: int, written: Written) -> dict[str, Any]:
        text, ended = self.one.text_of(written, asked.start)
        text, stopped = cut(text, self.body.stops())
        reason = "stop" if ended or stopped else "length"
        index = number * self.body.n + row
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}

    def settled(self, asked: Asked, ticket: Ticket, progress: Progress, told: str) -> str:
        """Where tokens stay once they are written: the text up to the first mask, less what may yet turn
        out to be part of a character or of a string that ends the text."""
        mask_id = self.one.engine.process.vocab.mask_id
        if mask_id is None or not self.one.settles(ticket):
            return ""
        ids = progress.z[asked.start :].tolist()
        ends = [i for i in (mask_id, self.one.model.tokenizer.eos_id) if i in ids]
        ids = ids[: min((ids.index(i) for i in ends), default=len(ids))]
        text = self.one.model.tokenizer.decode(ids).rstrip("\ufffd")
        stops = self.body.stops()
        text, stopped = cut(text, stops)
        if not stopped:
            text = text[: len(text) - max((len(stop) - 1 for stop in stops), default=0)]
        return text[len(told) :]


H = TypeVar("H", bound=Holes)


class HolesJob(Job[H]):
    """A template with its holes filled."""

    kind = "infill"

    def n_rows(self) -> int:
        return 1

    @property
    def has_patterns(self) -> bool:
        return any(blank is not None for blank in self.body.blanks)

    def rows(self, check: Check) -> list[Asked]:
        row = self.one.template(self.body.template)
        blanks = [None if b is None else BlankRule(b.choices, b.regex) for b in self.body.blanks]
        forced = {int(where): token for where, token in self.body.forced.items()}
        ids = force(row.ids, forced, self.one.encode)
        rules = self.one.rules(
            row, banned=self.body.banned, blanks=blanks, n=self.body.n, check=check
        )
        return [Asked(ids, 0, rules)]

    def choice(self, number: int, asked: Asked, row: int, written: Written) -> dict[str, Any]:
        text, _ = self.one.text_of(written, asked.start)
        tokens = written.tokens.tolist()
        return {"index": row, "text": text, "tokens": tokens, "finish_reason": "length"}


class InfillJob(HolesJob[Infill]):
    @property
    def records(self) -> bool:
        return self.body.trajectory
