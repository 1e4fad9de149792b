"""Wrong requests, and clients that misbehave: a proper refusal, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import LONG, SHORT, Server, started

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", b"{", 400, "the body is no JSON: Expecting property name"),
        ("/v1/completions", {"prompt": 5}, 400, "prompt: Input should be a valid string, or: Input"),
        ("/v1/completions", b"", 400, "required"),
        ("/v1/completions", b"[1]", 400, ""),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "unicode"),
        ("/v1/completions", b'{"temperature": NaN}', 400, "temperature"),
        ("/v1/completions", {"steps": "many"}, 400, "steps"),
        ("/v1/completions", {"stepps": 4}, 400, "stepps"),
        ("/v1/completions", {"seed": 1 << 70}, 400, "seed"),
        ("/v1/completions", {"n": 17}, 400, "at most 16 texts"),
        ("/v1/completions", {"max_tokens": 10**9}, 400, "at most 160 tokens"),
        ("/v1/completions", {"model": "nothing"}, 404, "no model 'nothing'"),
        ("/v1/completions", {"guidance": 2.0}, 400, "no meaning for the ancestral"),
        ("/v1/infill", {"template": "no hole"}, 400, "no hole"),
        ("/v1/infill", {"template": "<mask:99999>"}, 400, "at most 160"),
        ("/v1/infill", {"template": "a <mask:2> b <MASK:4>"}, 400, "'<MASK:4>' is no hole"),
        ("/v1/infill", {"template": "a <mask:1>", "blanks": [{"choices": ["a long way"]}]}, 400,
         "a blank of 1 tokens cannot hold any of its choices"),
        ("/v1/infill", {"template": "a <mask>", "blanks": [{"regex": "(a"}]}, 400, "no regular expr"),
        ("/v1/infill", {"template": "a <mask>", "banned": list(range(2048))}, 400, "every token"),
        ("/v1/infill", {"template": "a <mask>", "forced": {"0": 3}}, 400, "not in a hole"),
        ("/v1/score", {"input": ""}, 400, "1 to 160 tokens"),
        ("/v1/nothing", {}, 404, "Not Found"),
        ("/v1/models", {}, 405, "Method Not Allowed"),
        ("/v1/completions", b" " * 70_000, 413, "larger than 65,536"),
    ],
)  # fmt: skip
def test_every_error_is_json(server: Server, path: str, body: Any, status: int, says: str) -> None:
    got, headers, content = server.send("POST", path, body)
    error = json.loads(content)["error"]
    assert (got, headers["content-type"]) == (status, "application/json"), content
    assert says in error["message"] and error["code"] == status


def test_errors_name_the_field(server: Server) -> None:
    for body, param in (
        (b'{"prompt": }', None), ({"prompt": 5}, "prompt"), ({"prompt": ["a", 5]}, "prompt.1"),
        ({"stop": {}}, "stop"), ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
    ):  # fmt: skip
        error = json.loads(server.send("POST", "/v1/completions", body)[2])["error"]
        assert error["param"] == param, error


def test_large_body_without_a_length_is_refused(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        try:
            for _ in range(40):
                client.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        except OSError:
            pass  # it has heard enough
        assert b" 413 " in client.recv(4096)


def test_what_is_not_http_is_told_so_in_json(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(b"HELLO\r\n\r\n")
        answer = b""
        while part := client.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head and b"application/json" in head
    assert json.loads(body)["error"]["code"] == 400


def test_nothing_for_other_origins(server: Server) -> None:
    _, headers, _ = server.send("GET", "/v1/models", Origin="http://evil.example")
    assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_vanish_leave_nothing(server: Server, stream: bool) -> None:
    before = server.metric("xdlm_requests_total", model="pocket", outcome="cancelled")
    body = json.dumps({**LONG, "stream": stream}).encode()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            if stream:
                assert b"200 OK" in client.recv(1000)
            else:
                time.sleep(0.2)
    server.idle()
    after = server.metric("xdlm_requests_total", model="pocket", outcome="cancelled")
    assert after == before + 3
    server.post("/v1/completions", **SHORT)


def run_apart(work: Coroutine[Any, Any, None]) -> None:
    """In a thread of its own: a browser that tests have opened keeps a loop running in this one."""
    with ThreadPoolExecutor(1) as apart:
        apart.submit(asyncio.run, asyncio.wait_for(work, 10)).result()


def test_a_client_that_does_not_read_is_left(monkeypatch) -> None:
    from xdlm.serve.web import guard

    left: list[bool] = []

    class Connection:
        def abort(self) -> None:
            left.append(True)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def stalled(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    monkeypatch.setattr(guard, "READ_SECONDS", 0.1)
    scope = {"type": "http", "path": "/", "headers": [], "state": {"transport": Connection()}}
    run_apart(guard.Guard(app, key=None, max_body=9)(scope, receive, stalled))
    assert left == [True]


def test_a_ticket_that_fails_ends_the_others() -> None:
    from collections import Counter

    from xdlm.sampling import SamplerConfig
    from xdlm.serve.requests import Request, Ticket
    from xdlm.serve.web.streams import finished

    class Client:
        async def is_disconnected(self) -> bool:
            return False

    asked = Request([None], SamplerConfig())
    sick, well = (Ticket(asked, Counter()) for _ in range(2))

    async def wait() -> None:
        asyncio.get_running_loop().call_later(0.05, sick.fail, RuntimeError("no"), "failed")
        await finished([well, sick], Client())  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match="no"):
        run_apart(wait())
    assert well.done, "nobody waits for it any more"


NASTY: list[Any] = [
    None, True, -1, 0, 1, 3, 10**6, 2**63, 1e300, -0.0, 0.5, "", "a", "\x00", "<mask:2>", "\ud800",
    "é" * 300, [], ["a"], [None], [[1]], {}, {"a": 1}, {"0": 1}, {"1": "a"}, [{"regex": "a*"}],
    [{"choices": ["a"]}],
]  # fmt: skip


FIELDS = {
    "/v1/completions": ("prompt", "max_tokens", "stop", "n", "seed", "steps", "sampler", "temperature",
                        "top_p", "k", "last", "block_length", "guidance", "confidence", "user", "model"),
    "/v1/infill": ("template", "forced", "banned", "blanks", "n", "seed", "trajectory", "k", "steps"),
    "/v1/score": ("input", "draws", "seed", "model"),
}  # fmt: skip


def test_no_body_breaks_the_server(server: Server) -> None:
    """Each field of each route with each of many odd values: an answer or a proper refusal, never a 5xx."""
    good: dict[str, dict[str, Any]] = {
        "/v1/completions": {"max_tokens": 2, "steps": 1},
        "/v1/infill": {"template": "a <mask:2>", "steps": 1},
        "/v1/score": {"input": "It was", "draws": 2},
    }
    bodies = [
        (path, {**good[path], field: value})
        for path, fields in FIELDS.items()
        for field in fields
        for value in NASTY
    ]

    def status(asked: tuple[str, dict[str, Any]]) -> int:
        got, headers, content = server.send("POST", *asked)
        assert got in (200, 400, 404), (asked, content)
        assert headers["content-type"] == "application/json" and json.loads(content)
        return got

    with ThreadPoolExecutor(4) as clients:
        statuses = list(clients.map(status, bodies))
    assert statuses.count(200) > 50 and statuses.count(400) > 50
    server.idle()


def test_nothing_that_the_schema_allows_breaks_it(tmp_path: Path) -> None:
    """schemathesis: what it makes up from the served schema, and what it breaks on purpose."""
    pytest.importorskip("schemathesis")
    checks = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
              "response_schema_conformance")  # fmt: skip
    for server in started("--max-length", "48", "--max-steps", "8", "--max-n", "2"):
        own = server.post("/v1/completions", prompt="It", max_tokens=4)
        assert own["usage"]["forward_passes"] <= 9, "by default no more steps than are allowed"
        address = f"http://127.0.0.1:{server.port}/openapi.json"
        done = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "--no-color", "run", address, "--seed", "1",
             "--checks", ",".join(checks), "--phases", "examples,coverage,fuzzing",
             "--max-examples", "8", "--generation-database", "none"],
            capture_output=True, text=True, timeout=120, cwd=tmp_path,  # it leaves files behind
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr
        assert re.search(r"\d{3,} generated", done.stdout), "it looked at hundreds of requests"
        statuses = {
            status for path in ("/v1/completions", "/v1/infill", "/v1/score", "/v1/trajectory")
            for status in ("200", "400")
            if server.metric("xdlm_http_responses_total", path=path, status=status)
        }  # fmt: skip
        assert statuses == {"200", "400"}
