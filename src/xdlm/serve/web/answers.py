"""Texts for clients: all at once, or step by step as server-sent events."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from xdlm.blanks import BlankRule, force
from xdlm.errors import UserError
from xdlm.report.exporting import FORMATS
from xdlm.report.recording import Recording
from xdlm.sampling.writing import join_trajectories
from xdlm.serve.engine import Progress, Ticket, Written
from xdlm.serve.service import Service, cut, new_seed
from xdlm.serve.web.bodies import Completion, Film, Infill
from xdlm.serve.web.failures import error_of
from xdlm.serve.web.guard import Json
from xdlm.serve.web.streams import Steps, event, finished

_MEDIA = {"html": "text/html; charset=utf-8", "json": "application/json", "svg": "image/svg+xml",
          "gif": "image/gif"}  # fmt: skip
#: Files that are drawn at once: a long film keeps a core busy.
_DRAWING = asyncio.Semaphore(1)


class Answering(ABC):
    """A request for texts: its tickets, and their answer at once or step by step."""

    kind: ClassVar[str]
    tickets: list[Ticket]

    def __init__(self, service: Service, body: Completion | Infill | Film) -> None:
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
    def submit(self, steps: Steps | None) -> list[Ticket]:
        """A ticket for each; its steps go to `steps` if they are wanted."""

    @abstractmethod
    def choice(self, number: int, row: int, written: Written) -> dict[str, Any]:
        """A finished text as the client gets it."""

    def extra(self, results: list[list[Written]]) -> dict[str, Any]:
        return {}

    async def answer(self, http: HttpRequest) -> Response:
        if not isinstance(self.body, Film) and self.body.stream:
            steps = Steps()
            # In a thread of its own: a long pattern must not keep other requests waiting.
            tickets = await asyncio.to_thread(self.submit, steps)
            for number, ticket in enumerate(tickets):
                steps.end(number, ticket)
            return _Stream(self._events(steps, tickets), tickets)
        results = await finished(await asyncio.to_thread(self.submit, None), http)
        choices = [
            self.choice(number, row, written)
            for number, rows in enumerate(results)
            for row, written in enumerate(rows)
        ]
        usage = self._usage(results)
        return Json(
            {
                **self.head,
                "choices": choices,
                "usage": usage,
                "seed": self.seed,
                **self.extra(results),
            }
        )

    def _usage(self, results: Sequence[Sequence[Written]]) -> dict[str, int]:
        written = [row for rows in results for row in rows]
        filled = [list(ticket.request.ids).count(None) for ticket in self.tickets]
        prompt = sum(len(t.request.ids) for t in self.tickets) - sum(filled)
        ends = zip(self.tickets, filled, results, strict=True)
        out = sum(n - (len(t.request.ids) - row.end) for t, n, rows in ends for row in rows)
        return {
            "prompt_tokens": prompt, "completion_tokens": out, "total_tokens": prompt + out,
            "forward_passes": max(row.nfe for row in written),
        }  # fmt: skip

    async def _events(self, steps: Steps, tickets: Sequence[Ticket]) -> AsyncIterator[str]:
        told: dict[int, str] = {}
        states: dict[int, list[int]] = {}
        results: dict[int, list[Written]] = {}
        async for number, item in steps.all(tickets):
            if isinstance(item, Progress):
                index = number * self.body.n + item.number
                new = self.settled(number, item, told.get(index, ""))
                told[index] = told.get(index, "") + new
                step = self._step(number, item, states.get(index))
                states[index] = item.z.tolist()
                part = {"index": index, "text": new, "finish_reason": None, "logprobs": None}
                yield event({**self.head, "choices": [part], "xdlm": step})
                continue
            try:
                results[number] = item.result(0)
            except Exception as error:
                yield event({"error": error_of(error)})
                return
            for row, written in enumerate(results[number]):
                choice = self.choice(number, row, written)
                choice["text"] = choice["text"].removeprefix(told.get(choice["index"], ""))
                yield event({**self.head, "choices": [choice], "seed": self.seed})
        ordered = [results[number] for number in range(len(tickets))]
        yield event(
            {**self.head, "choices": [], "usage": self._usage(ordered), **self.extra(ordered)}
        )
        yield event("[DONE]")

    def settled(self, number: int, progress: Progress, told: str) -> str:
        """What can be told of a text that is not finished, beyond what was told."""
        return ""

    def _step(
        self, number: int, progress: Progress, before: Sequence[int] | None
    ) -> dict[str, Any]:
        """A step as [position, text, probability] of each token that became another one: the text is null
        for a mask, the probability where the token came from the noise. Step 0 has every token, and
        which positions are open."""
        ids, probs = progress.z.tolist(), progress.probs.tolist()
        masks = self.one.engine.process.special_ids
        moved = [
            i for i, token in enumerate(ids)
            if before is None or (token != before[i] and not {token, before[i]} <= set(masks))
        ]  # fmt: skip
        pieces = self.one.model.tokenizer.pieces([ids[i] for i in moved])
        step: dict[str, Any] = {
            "step": progress.step, "steps": progress.steps, "time": progress.time,
            "changes": [
                [i, None if ids[i] in masks else piece,
                 None if math.isnan(probs[i]) else round(probs[i], 6)]
                for i, piece in zip(moved, pieces, strict=True)
            ],
        }  # fmt: skip
        if before is None:
            given = self.tickets[number].request.ids
            step["open"] = [i for i, token in enumerate(given) if token is None]
        return step


class _Stream(StreamingResponse):
    """Events, and the end of the work when they end: also when the client is gone."""

    def __init__(self, events: AsyncIterator[str], tickets: Sequence[Ticket]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.tickets = tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for ticket in self.tickets:
                ticket.cancel()


class CompletionAnswer(Answering):
    """Texts behind prompts."""

    kind = "text_completion"
    body: Completion

    def n_rows(self) -> int:
        return len(self.body.prompts())

    def submit(self, steps: Steps | None) -> list[Ticket]:
        self.prompts = [self.one.encode(prompt) for prompt in self.body.prompts()]
        room = min(self.body.max_tokens, self.one.bounds.max_length + 1)
        self.tickets = _all_or_none(
            lambda number, ids: self.one.submit(
                [*ids, *[None] * room], self.body.how(), n=self.body.n, seed=self.seed,
                k=self.body.k, stop=True, on_step=None if steps is None else steps.watcher(number),
            ),
            self.prompts,
        )  # fmt: skip
        return self.tickets

    def choice(self, number: int, row: int, written: Written) -> dict[str, Any]:
        text, ended = self.one.text_of(written, len(self.prompts[number]))
        text, stopped = cut(text, self.body.stops())
        reason = "stop" if ended or stopped else "length"
        index = number * self.body.n + row
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}

    def settled(self, number: int, progress: Progress, told: str) -> str:
        """Where tokens stay once they are written: the text up to the first mask, less what may yet turn
        out to be part of a character or of a string that ends the text."""
        mask_id = self._mask_id
        if mask_id is None or not self.one.settles(self.tickets[number]):
            return ""
        ids = progress.z[len(self.prompts[number]) :].tolist()
        ends = [i for i in (mask_id, self.one.model.tokenizer.eos_id) if i in ids]
        ids = ids[: min((ids.index(i) for i in ends), default=len(ids))]
        text = self.one.model.tokenizer.decode(ids).rstrip("\ufffd")
        stops = self.body.stops()
        text, stopped = cut(text, stops)
        if not stopped:
            text = text[: len(text) - max((len(stop) - 1 for stop in stops), default=0)]
        return text[len(told) :]

    @property
    def _mask_id(self) -> int | None:
        process = self.one.model.process
        return None if process is None else process.vocab.mask_id


class InfillAnswer(Answering):
    """Templates with their holes filled."""

    kind = "infill"
    body: Infill | Film

    @property
    def records(self) -> bool:
        return isinstance(self.body, Film) or self.body.trajectory

    def n_rows(self) -> int:
        return 1

    def submit(self, steps: Steps | None) -> list[Ticket]:
        row = self.one.template(self.body.template)
        blanks = [None if b is None else BlankRule(b.choices, b.regex) for b in self.body.blanks]
        rules = self.one.rules(row, banned=self.body.banned, blanks=blanks)
        forced = {int(where): token for where, token in self.body.forced.items()}
        ids = force(row.ids, forced, self.one.encode)
        ticket = self.one.submit(
            ids, self.body.how(), n=self.body.n, seed=self.seed, k=self.body.k, rules=rules,
            record=self.records, on_step=None if steps is None else steps.watcher(0),
        )  # fmt: skip
        self.tickets = [ticket]
        return self.tickets

    def choice(self, number: int, row: int, written: Written) -> dict[str, Any]:
        text, _ = self.one.text_of(written, 0)
        tokens = written.tokens.tolist()
        return {"index": row, "text": text, "tokens": tokens, "finish_reason": "length"}

    def extra(self, results: list[list[Written]]) -> dict[str, Any]:
        return {"trajectory": self.recording(results).document()} if self.records else {}

    def recording(self, results: list[list[Written]]) -> Recording:
        paths = [row.trajectory for rows in results for row in rows if row.trajectory is not None]
        process = self.one.model.config.process
        k = process.k if self.body.k is None else self.body.k
        details = {
            "model": self.one.name,
            "noise": process.kind + ("" if k is None else f", k = {k}"),
            "sampler": self.body.sampler,
            "steps": str(self.body.steps),
            "forward passes": str(max(row.nfe for rows in results for row in rows)),
            "seed": str(self.seed),
            "temperature": str(self.body.temperature),
            "top-p": str(self.body.top_p),
        }
        return Recording.of(join_trajectories(paths), self.one.model.tokenizer, details)


class TrajectoryAnswer(InfillAnswer):
    """How templates were filled, as a file."""

    body: Film

    async def answer(self, http: HttpRequest) -> Response:
        results = await finished(await asyncio.to_thread(self.submit, None), http)
        async with _DRAWING:
            content = await asyncio.to_thread(self._drawn, results)
        return Response(content, media_type=_MEDIA[self.body.format])

    def _drawn(self, results: list[list[Written]]) -> str | bytes:
        return FORMATS[self.body.format](self.recording(results), "How the text came about")


def _all_or_none(
    submit: Callable[[int, list[int]], Ticket], rows: Sequence[list[int]]
) -> list[Ticket]:
    """Tickets for all rows, or an error and none."""
    tickets: list[Ticket] = []
    try:
        for number, row in enumerate(rows):
            tickets.append(submit(number, row))
    except Exception:
        for ticket in tickets:
            ticket.cancel()
        raise
    return tickets
