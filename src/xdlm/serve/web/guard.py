"""What every request passes first: a key, a bound on its size, clocks on its arrival and on the reading
of its answer; and the answers to those that fail."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Seconds that a client may take to send its body.
BODY_SECONDS = 30.0
#: Seconds that a client may take to make room for more of its answer.
READ_SECONDS = 30.0
#: Where a request's scope holds its connection.
TRANSPORT = "transport"
#: What needs no key: the page asks for it.
_OPEN = ("/healthz", "/")
_OPEN_FOLDER = "/page/"


class Json(Response):
    """Strict JSON in plain ASCII: whatever text came in can go out again."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


def failure(
    status: int,
    message: str,
    *,
    kind: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Json:
    """An error as OpenAI's clients read it."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return Json({"error": error}, status, headers)


class Guard:
    """In front of the application; counts what it lets through by path and status."""

    def __init__(self, app: ASGIApp, *, key: str | None, max_body: int) -> None:
        self.app, self.key, self.max_body = app, key, max_body
        self.answered: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            try:
                async with asyncio.timeout(READ_SECONDS):
                    await send(message)
            except TimeoutError:  # it does not read, and would be waited for forever
                scope["state"][TRANSPORT].abort()

        try:
            await self._pass(scope, receive, noting)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self.answered[path, status] += 1
            self.seconds[path] += time.monotonic() - began

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        if not _is_open(scope["path"]) and not self._knows(headers.get(b"authorization", b"")):
            refusal = failure(
                401, "a valid API key is needed: Authorization: Bearer KEY",
                kind="authentication_error", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
            await refusal(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._body(headers, receive)
        except TimeoutError:
            late = failure(408, "the body did not arrive in time", kind="invalid_request_error")
            await late(scope, receive, send)
            return
        if body is None:
            await _too_large(self.max_body)(scope, receive, send)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    def _knows(self, authorization: bytes) -> bool:
        if self.key is None:
            return True
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self.key.encode())

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None where it is too large."""
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.max_body:
            return None
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return body
            body += message.get("body", b"")
            if len(body) > self.max_body:
                return None
            if not message.get("more_body", False):
                return body


class Cors(CORSMiddleware):
    """In front of the guard: a browser asks what it may do before it shows its key, and can read a refusal
    only with these headers."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["Retry-After"],
        )  # fmt: skip

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        why = bytes(answer.body).decode()
        return failure(
            answer.status_code, why, kind="invalid_request_error", headers={"Vary": "Origin"}
        )


def _is_open(path: str) -> bool:
    return path in _OPEN or path.startswith(_OPEN_FOLDER)


def _too_large(limit: int) -> Json:
    return failure(
        413, f"the body is larger than {limit:,} bytes", kind="invalid_request_error",
        headers={"Connection": "close"},
    )  # fmt: skip
