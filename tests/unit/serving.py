"""`xdlm serve` for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

#: One of each kind of noise.
MODELS = ("pocket-mdlm", "pocket-xdlm", "pocket-udlm")
#: Completions that are there at once, and that take many seconds.
SHORT: dict[str, Any] = {"prompt": "It was", "max_tokens": 12, "steps": 6, "seed": 3}
LONG: dict[str, Any] = {"prompt": "It was", "max_tokens": 120, "steps": 1000}
#: A pattern of thousands of states: whether there was an a thirteen characters ago.
ENDLESS = {"template": "<mask:8>", "blanks": [{"regex": "(.|\\n)*a(.|\\n){12}"}], "steps": 1}


class Server:
    """`xdlm serve` in a process of its own, on a port of its choice."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "xdlm.cli.main", "serve", "--port", "0", "--device", "cpu", *arguments],
            stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        )  # fmt: skip
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line + self.process.stderr.read()
        self.port = int(found[1])
        self.headers: dict[str, str] = {}

    def send(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        own = {"Content-Type": "application/json", **self.headers, **headers}
        connection.request(method, path, body, own)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, content

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        status, _, content = self.send("POST", path, body)
        assert status == 200, content
        return json.loads(content)

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        status, headers, content = self.send("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        lines = content.decode().strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all lines that have these labels."""
        text = self.send("GET", "/metrics")[2].decode()
        return sum(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith(name + "{")
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        )

    def idle(self) -> None:
        """Until nothing is being written."""
        until = time.monotonic() + 30
        while self.metric("xdlm_rows_active") + self.metric("xdlm_rows_waiting"):
            assert time.monotonic() < until, "something goes on"
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def started(*arguments: str, **environ: str) -> Iterator[Server]:
    """A server that is there until the test is over, and then must stop as it should."""
    server = Server(*arguments, **environ)
    assert server.process.stderr is not None
    try:
        yield server
        if server.process.poll() is None:
            assert server.stop() == 0
    finally:
        server.process.kill()
        server.process.stderr.close()
