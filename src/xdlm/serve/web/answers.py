"""Texts for clients, all at once."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xdlm.serve.web.films import trajectory_of
from xdlm.serve.web.guard import Json
from xdlm.serve.web.jobs import Job
from xdlm.serve.web.streams import finished
from xdlm.serve.web.submission import submitted


async def answer(job: Job[Any], http: HttpRequest) -> Response:
    """Everything, once it is finished."""
    work = await submitted(job, http)
    results = await finished(work.tickets, http)
    choices = [
        choice for number, rows in enumerate(results) for choice in work.choices(number, rows)
    ]
    return Json({
        **job.head, "choices": choices, "usage": work.usage(results), "seed": job.seed,
        **trajectory_of(work, results),
    })  # fmt: skip
