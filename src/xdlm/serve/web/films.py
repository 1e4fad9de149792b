"""How a text came about: every step as data, as a page or as a picture."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xdlm.report.exporting import FORMATS
from xdlm.report.recording import Recording, run_details
from xdlm.sampling.writing import join_trajectories
from xdlm.serve.web.bodies import Film
from xdlm.serve.web.jobs import HolesJob
from xdlm.serve.web.streams import awaited, finished
from xdlm.serve.web.submission import Results, Submitted, submitted
from xdlm.serve.workers import Check

_MEDIA = {"html": "text/html; charset=utf-8", "json": "application/json", "svg": "image/svg+xml",
          "gif": "image/gif"}  # fmt: skip


class FilmJob(HolesJob[Film]):
    @property
    def records(self) -> bool:
        return True


def trajectory_of(work: Submitted, results: Results) -> dict[str, Any]:
    """The steps as part of an answer, if they were asked for."""
    return {"trajectory": _recording(work, results).document()} if work.job.records else {}


def _recording(work: Submitted, results: Results) -> Recording:
    job, written = work.job, [row for rows in results for row in rows]
    paths = [row.trajectory for row in written if row.trajectory is not None]
    details = run_details(
        job.one.name, job.one.sampled_as(job.body.k), work.tickets[0].request.config,
        seed=job.seed, nfe=max(row.nfe for row in written),
    )  # fmt: skip
    return Recording.of(join_trajectories(paths), job.one.model.tokenizer, details)


async def film(job: FilmJob, http: HttpRequest) -> Response:
    """As a file."""
    work = await submitted(job, http)
    results = await finished(work.tickets, http)

    def drawn(check: Check) -> str | bytes:
        return FORMATS[job.body.format](_recording(work, results), "How the text came about")

    content = await awaited(job.service.drawing.submit(drawn), http, job.clock)
    return Response(content, media_type=_MEDIA[job.body.format])
