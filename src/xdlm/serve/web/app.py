"""The routes: OpenAI's completions and models, and infilling, trajectories, scoring, health, metrics and
the page."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from xdlm import __version__
from xdlm.errors import UserError
from xdlm.serve.requests import Closed, Overloaded
from xdlm.serve.service import Served, Service
from xdlm.serve.web.answers import answer
from xdlm.serve.web.bodies import Completion, Film, Infill, Score
from xdlm.serve.web.events import stream
from xdlm.serve.web.failures import answer_to, closing, what_is_wrong
from xdlm.serve.web.films import FilmJob, film
from xdlm.serve.web.guard import Cors, Guard, Json, failure
from xdlm.serve.web.jobs import CompletionJob, InfillJob
from xdlm.serve.web.metrics import exposition
from xdlm.serve.web.schema import FAILURES, describe
from xdlm.serve.web.scores import score_texts
from xdlm.serve.web.static import page_routes
from xdlm.serve.web.streams import ClientGone


def make_app(
    service: Service,
    *,
    key: str | None = None,
    max_body: int = 1 << 20,
    origins: Sequence[str] = (),
) -> ASGIApp:
    """The application, with its guard in front."""
    app = FastAPI(title="xdlm", version=__version__, docs_url=None, redoc_url=None)
    _add_errors(app)
    app.include_router(page_routes())
    guard = Guard(app, key=key, max_body=max_body)

    @app.get("/healthz")
    async def healthz() -> Response:
        return Json({"status": "ok"}) if service.alive else closing()

    @app.get("/metrics", responses=FAILURES, response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(exposition(service, guard), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", responses=FAILURES)
    async def models() -> Response:
        return Json(
            {"object": "list", "data": [_described(one) for one in service.served.values()]}
        )

    @app.get("/v1/models/{name:path}", responses=FAILURES)
    async def one_model(name: str) -> Response:
        return Json(_described(service.find(name)))

    @app.post("/v1/completions", responses=FAILURES)
    async def completions(body: Completion, http: HttpRequest) -> Response:
        job = CompletionJob(service, body)
        return await (stream(job, http) if body.stream else answer(job, http))

    @app.post("/v1/infill", responses=FAILURES)
    async def infill(body: Infill, http: HttpRequest) -> Response:
        job = InfillJob(service, body)
        return await (stream(job, http) if body.stream else answer(job, http))

    @app.post("/v1/trajectory", responses=FAILURES, response_class=Response)
    async def trajectory(body: Film, http: HttpRequest) -> Response:
        return await film(FilmJob(service, body), http)

    @app.post("/v1/score", responses=FAILURES)
    async def score(body: Score, http: HttpRequest) -> Response:
        return await score_texts(service.find(body.model), body, http)

    describe(app, service)
    return Cors(guard, origins) if origins else guard


def _described(one: Served) -> dict[str, Any]:
    process = one.model.config.process
    return {
        "id": one.name, "object": "model", "created": one.created, "owned_by": "xdlm",
        "noise": process.kind, "k": process.k, "length": one.model.length,
        "max_length": one.bounds.max_length,
        "xdlm": {
            "max_steps": one.bounds.max_steps, "max_tokens": one.bounds.max_length,
            "max_n": one.bounds.max_n, "default_steps": one.bounds.default_steps,
        },
    }  # fmt: skip


def _add_errors(app: FastAPI) -> None:
    async def known(http: HttpRequest, error: Exception) -> Response:
        return answer_to(error)

    async def invalid(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = what_is_wrong(error)
        return failure(400, message, kind="invalid_request_error", param=param)

    async def http_error(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = "invalid_request_error"
        return failure(error.status_code, str(error.detail), kind=kind, headers=error.headers)

    for kind in (
        UserError,
        Overloaded,
        Closed,
        TimeoutError,
        ClientGone,
        CancelledError,
        Exception,
    ):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
