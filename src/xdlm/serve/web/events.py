"""Texts step by step, as server-sent events."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from xdlm.serve.requests import Progress, Ticket, Written
from xdlm.serve.service import Served
from xdlm.serve.web.failures import error_of
from xdlm.serve.web.films import trajectory_of
from xdlm.serve.web.jobs import CompletionJob, InfillJob
from xdlm.serve.web.streams import Steps, event
from xdlm.serve.web.submission import Submitted, submitted


async def stream(job: CompletionJob | InfillJob, http: HttpRequest) -> Response:
    """Every step as it is taken, and every text when it is finished."""
    steps = Steps()
    work = await submitted(job, http, steps.watcher)
    for number, ticket in enumerate(work.tickets):
        steps.end(number, ticket)
    return _Stream(_events(work, steps, counted=job.body.counts_tokens), work.tickets)


async def _events(work: Submitted, steps: Steps, *, counted: bool) -> AsyncIterator[str]:
    job, told, states = work.job, dict[int, str](), dict[int, list[int]]()
    results: dict[int, Sequence[Written]] = {}
    async for number, item in steps.all(work.tickets):
        if isinstance(item, Progress):
            index = number * job.body.n + item.number
            asked, ticket = work.rows[number], work.tickets[number]
            new = job.settled(asked, ticket, item, told.get(index, ""))
            told[index] = told.get(index, "") + new
            step = _step(job.one, asked.ids, item, states.get(index))
            states[index] = item.z.tolist()
            part = {"index": index, "text": new, "finish_reason": None, "logprobs": None}
            yield event({**job.head, "choices": [part], "xdlm": step})
            continue
        try:
            results[number] = item.result(0)
        except Exception as error:
            yield event({"error": error_of(error)})
            return
        for choice in work.choices(number, results[number]):
            choice["text"] = choice["text"].removeprefix(told.get(choice["index"], ""))
            yield event({**job.head, "choices": [choice], "seed": job.seed})
    # The usual loop reads choices[0] of every event: one without any comes only where it was asked for.
    ordered = [results[number] for number in range(len(work.tickets))]
    usage = {"usage": work.usage(ordered)} if counted else {}
    more = {**usage, **trajectory_of(work, ordered)}
    if more:
        yield event({**job.head, "choices": [], **more})
    yield event("[DONE]")


def _step(
    one: Served, given: Sequence[int | None], progress: Progress, before: Sequence[int] | None
) -> dict[str, Any]:
    """A step as [position, text, probability] of each token that became another one: the text is null
    for a mask, the probability where the token came from the noise. Step 0 has every token, and
    which positions are open."""
    ids, probs = progress.z.tolist(), progress.probs.tolist()
    masks = one.engine.process.special_ids
    moved = [
        i for i, token in enumerate(ids)
        if before is None or (token != before[i] and not {token, before[i]} <= set(masks))
    ]  # fmt: skip
    pieces = one.model.tokenizer.pieces([ids[i] for i in moved])
    step: dict[str, Any] = {
        "step": progress.step, "steps": progress.steps, "time": progress.time,
        "changes": [
            [i, None if ids[i] in masks else piece,
             None if math.isnan(probs[i]) else round(probs[i], 6)]
            for i, piece in zip(moved, pieces, strict=True)
        ],
    }  # fmt: skip
    if before is None:
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
