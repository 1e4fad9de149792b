"""uvicorn's HTTP, with errors in JSON, and a way out for those who write to a client that does not read."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from xdlm.serve.web.guard import TRANSPORT, failure


class Protocol(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, TRANSPORT: transport}

    def send_400_response(self, msg: str) -> None:
        """What is not even HTTP."""
        body = bytes(failure(400, msg, kind="invalid_request_error").body)
        headers = [
            ("Content-Type", "application/json"), ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]  # fmt: skip
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
