"""uvicorn, with an end of our own: on SIGTERM or Ctrl-C no new work, what was begun is finished, exit 0."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from xdlm.errors import UserError
from xdlm.serve.service import Service
from xdlm.serve.web.protocol import Protocol

#: Seconds for the last answers to leave, when time is up.
_TELLING = 3


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, service: Service, drain: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.service, self.drain, self.ready = service, drain, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What is not finished in time is given up, while its client can still be told."""
        late = asyncio.get_running_loop().call_later(self.drain, self.service.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again at the end, and so never exit with 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        """Once: finish what was begun. Twice: leave it."""
        self.force_exit = self.should_exit
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """A socket on that address, not yet open to anyone; port 0 takes any that is free."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio sends small packets at once (TCP_NODELAY) only where the protocol is named: an answer
        # would wait 40 ms for an acknowledgement.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port}: {error}") from error
    return listener


def serve(
    app: ASGIApp,
    service: Service,
    listener: socket.socket,
    *,
    drain: float,
    ready: Callable[[], None],
) -> None:
    """Answer until a signal says otherwise; `drain` seconds are left to what was begun. `ready` is called
    once requests can come."""
    config = uvicorn.Config(
        app, http=Protocol, log_level="warning", access_log=False, lifespan="off", server_header=False,
        timeout_graceful_shutdown=math.ceil(drain) + _TELLING, timeout_keep_alive=5,
    )  # fmt: skip
    server = _Server(config, service, drain, ready)
    try:
        server.run(sockets=[listener])
    finally:
        service.close()
