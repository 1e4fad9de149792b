"""How likely texts are."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from xdlm.evaluation import Likelihood
from xdlm.serve.service import Served
from xdlm.serve.web.bodies import Score
from xdlm.serve.web.guard import Json
from xdlm.serve.web.streams import Clock, awaited


async def score_texts(one: Served, body: Score, http: HttpRequest) -> Response:
    """A pass through the model at a time, between the steps of those who write."""
    clock = Clock(one.bounds.timeout)
    texts = [body.input] if isinstance(body.input, str) else body.input
    rows = await asyncio.to_thread(one.pack_to_score, texts, draws=body.draws)
    work = one.engine.call(one.score(rows, draws=body.draws, seed=body.seed))
    found = await awaited(work, http, clock)
    data = [{"index": index, **_told(score)} for index, score in enumerate(found)]
    return Json({"object": "score", "model": one.name, "draws": body.draws, "data": data})


def _told(score: Likelihood) -> dict[str, Any]:
    return {
        "nats_per_token": score.nats_per_token, "nats_stderr": _finite(score.nats_stderr),
        "perplexity": _finite(score.value), "perplexity_stderr": _finite(score.stderr),
        "tokens": score.n_tokens,
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
