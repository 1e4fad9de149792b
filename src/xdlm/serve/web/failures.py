"""Every error as JSON, with a status of its own."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

from fastapi.exceptions import RequestValidationError

from xdlm.errors import UserError
from xdlm.serve.requests import Closed, Overloaded
from xdlm.serve.service import UnknownModel
from xdlm.serve.web.bodies import BlankBody, StreamOptions
from xdlm.serve.web.guard import Json, failure
from xdlm.serve.web.streams import ClientGone

#: Fields inside of fields.
_NESTED = {*BlankBody.model_fields, *StreamOptions.model_fields}
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


def what_is_wrong(error: RequestValidationError) -> tuple[str, str | None]:
    """With a body, and with which of its fields: a line, and the field's name."""
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        at, why = found[0]["loc"][-1], found[0]["ctx"]["error"]
        return f"the body is no JSON: {why} (at character {at})", None
    fields = [_field(e["loc"]) for e in found]
    # Of a field that may be one thing or another: as far into it as one of them led, and what was wrong.
    first = fields[0].split(".")[0]
    where = max((f for f in fields if f.split(".")[0] == first), key=lambda f: f.count("."))
    said = [e["msg"].removeprefix("Value error, ") for e in found if _field(e["loc"]) == where]
    return f"{where or 'body'}: {', or: '.join(dict.fromkeys(said))}", where or None


def _field(loc: Sequence[int | str]) -> str:
    """Without the names of types, which stand in it where there are several."""
    own = [str(part) for part in loc if part != "body"]
    known = own[:1] + [part for part in own[1:] if part.isdecimal() or part in _NESTED]
    return ".".join(known)


def error_of(error: BaseException) -> Any:
    """The same inside a stream, whose status is already out."""
    return json.loads(bytes(answer_to(error).body))["error"]
