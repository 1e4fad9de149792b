"""A request on its way into the engine, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest

from xdlm.serve.requests import Ticket, Written
from xdlm.serve.web.jobs import Asked, Job, Watch
from xdlm.serve.web.streams import awaited

Results = Sequence[Sequence[Written]]


class Submitted(NamedTuple):
    """A job in the engine's hands: a ticket for each of its rows."""

    job: Job[Any]
    rows: Sequence[Asked]
    tickets: Sequence[Ticket]

    def usage(self, results: Results) -> dict[str, int]:
        filled = [asked.ids.count(None) for asked in self.rows]
        prompt = sum(len(asked.ids) for asked in self.rows) - sum(filled)
        ends = zip(self.rows, filled, results, strict=True)
        out = sum(n - (len(asked.ids) - row.end) for asked, n, rows in ends for row in rows)
        return {
            "prompt_tokens": prompt, "completion_tokens": out, "total_tokens": prompt + out,
            "forward_passes": max(row.nfe for rows in results for row in rows),
        }  # fmt: skip

    def choices(self, number: int, written: Sequence[Written]) -> list[dict[str, Any]]:
        """Of one row, as often as it was written."""
        asked = self.rows[number]
        return [self.job.choice(number, asked, row, one) for row, one in enumerate(written)]


async def submitted(
    job: Job[Any], http: HttpRequest, watch: Watch = lambda number: None
) -> Submitted:
    """Hand a job to the engine. Its texts are read outside of the event loop; patterns, which may take
    long, have threads of their own, so that they keep nobody else waiting."""

    def hand_over(rows: Sequence[Asked] | None = None) -> Submitted:
        rows = job.rows(lambda: None) if rows is None else rows
        return Submitted(job, rows, job.submit(rows, watch))

    if not job.has_patterns:
        return await asyncio.to_thread(hand_over)
    rows = await awaited(job.service.compiling.submit(job.rows), http, job.clock)
    return await asyncio.to_thread(hand_over, rows)
