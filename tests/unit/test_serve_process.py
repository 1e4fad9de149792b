"""How the server starts, or says why it cannot, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import ENDLESS, LONG, SHORT, Server

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--drain", "inf"], "--drain must be positive, and not infinite"),
        (["--model", "nowhere"], "no model 'nowhere'"),
        (["--model", "pocket", "pocket"], "named twice"),
        (["--model", "pocket-judge", "--port", "0"], "autoregressive"),
        (["--port", "70000"], "--port must lie in"),
        (["--timeout", "0"], "must be positive"),
        (["--max-active", "0"], "--max-active must be"),
        (["--host", "203.0.113.9", "--port", "0"], "cannot listen on"),
        (["--api-key", ""], "the API key is empty"),
    ],
)
def test_a_server_that_cannot_start_says_why(capsys, arguments: list[str], says: str) -> None:
    from xdlm.cli.main import main

    with pytest.raises(SystemExit) as stop:
        main(["serve", *arguments])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and says in said and said.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--model", "nowhere"], ["--host", "203.0.113.9"]])
def test_a_server_that_cannot_start_leaves_no_socket_open(
    capsys, monkeypatch, arguments: list[str]
) -> None:
    from xdlm.cli.main import main

    made: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *how) -> None:
            super().__init__(*how)
            made.append(self)

    monkeypatch.setattr(socket, "socket", Noted)
    with pytest.raises(SystemExit):
        main(["serve", "--port", "0", *arguments])
    assert made and all(each.fileno() == -1 for each in made)


def test_sigterm_finishes_what_was_begun() -> None:
    server = Server("--drain", "60")  # a busy machine may take longer than the default
    body = {**SHORT, "max_tokens": 64, "steps": 150}
    answers: list[tuple[int, bytes]] = []

    def ask(stream: bool) -> None:
        status, _, content = server.send("POST", "/v1/completions", {**body, "stream": stream})
        answers.append((status, content))

    asking = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in asking:
        thread.start()
    until = time.monotonic() + 30
    while server.metric("xdlm_rows_active") < 2 and time.monotonic() < until:
        time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(OSError):
        server.send("POST", "/v1/completions", SHORT)
    for thread in asking:
        thread.join()
    assert server.process.wait(30) == 0
    assert [status for status, _ in answers] == [200, 200]
    assert any(content.endswith(b"data: [DONE]\n\n") for _, content in answers)
    assert server.process.stderr is not None
    assert server.process.stderr.read() == "", "no complaint"
    server.process.stderr.close()


def test_the_end_of_the_drain_is_told() -> None:
    """To those who wait for a text, a stream, a score and a pattern."""
    server = Server("--drain", "1")
    score = {"input": ["It was a dark night. " * 90] * 7, "draws": 16}
    asked = [("/v1/completions", {**LONG, "max_tokens": 1000, "stream": True}),
             ("/v1/completions", {**LONG, "max_tokens": 1000}),
             ("/v1/infill", ENDLESS), ("/v1/score", score)]  # fmt: skip
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(server.send, "POST", *one) for one in asked]
        until = time.monotonic() + 30
        while server.metric("xdlm_rows_active") < 2 and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.3)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        (status, _, stream), *others = [answer.result() for answer in answers]
        assert server.process.wait(30) == 0 and time.monotonic() - began < 15
    *_, last = stream.decode().strip().split("\n\n")
    assert status == 200 and json.loads(last.removeprefix("data: "))["error"]["code"] == 503
    for status, headers, content in others:
        assert (status, headers["content-type"]) == (503, "application/json"), content
        assert "shutting down" in json.loads(content)["error"]["message"]
    assert server.process.stderr is not None
    assert server.process.stderr.read() == "", "no complaint"
    server.process.stderr.close()
