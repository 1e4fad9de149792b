"""Every error as JSON, with a status of its own."""

from __future__ import annotations

import json
import logging
from concurrent.futures import CancelledError
from typing import Any

from xdlm.errors import UserError
from xdlm.serve.engine import Closed, Overloaded
from xdlm.serve.service import UnknownModel
from xdlm.serve.web.guard import Json, failure
from xdlm.serve.web.streams import ClientGone

_LOG = logging.getLogger("xdlm.serve")


def closing() -> Json:
    return failure(
        503, "the server is shutting down", kind="unavailable", headers={"Retry-After": "5"}
    )


def answer_to(error: BaseException) -> Json:
    """What to tell the client about an error."""
    bad = "invalid_request_error"
    if isinstance(error, UnknownModel):
        return failure(404, str(error), kind=bad, param="model")
    if isinstance(error, UserError):
        return failure(400, str(error), kind=bad)
    if isinstance(error, Overloaded):
        wait = {"Retry-After": str(error.retry_after)}
        return failure(429, str(error), kind="rate_limit_error", headers=wait)
    if isinstance(error, TimeoutError):
        return failure(504, str(error) or "not finished in time", kind="timeout")
    if isinstance(error, (Closed, CancelledError)):
        return closing()
    if isinstance(error, ClientGone):
        return failure(499, "the client went away", kind="cancelled")
    _LOG.error("a request failed", exc_info=error)
    return failure(500, "an error inside the server; its log says which", kind="server_error")


def error_of(error: BaseException) -> Any:
    """The same inside a stream, whose status is already out."""
    return json.loads(bytes(answer_to(error).body))["error"]
