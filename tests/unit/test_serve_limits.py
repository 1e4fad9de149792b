"""A server with a key, a short queue and little time: who may ask, and how much."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import ENDLESS, LONG, SHORT, Server, started

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    yield from started("--max-active", "1", "--max-waiting", "2", "--timeout", "4",
                       "--cors-origin", "http://good.example", XDLM_API_KEY="open sesame")  # fmt: skip


KEY = {"Authorization": "Bearer open sesame"}


def test_key_and_origin(small: Server) -> None:
    assert small.send("GET", "/healthz")[0] == 200
    for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": "open sesame"}):
        status, answered, content = small.send("POST", "/v1/completions", SHORT, **headers)
        assert (status, answered["www-authenticate"]) == (401, "Bearer")
        assert "API key" in json.loads(content)["error"]["message"]
    status, headers, _ = small.send(
        "POST", "/v1/completions", SHORT, Origin="http://good.example", **KEY
    )
    assert (status, headers["access-control-allow-origin"]) == (200, "http://good.example")
    lower = {"Authorization": "bearer open sesame"}
    assert small.send("GET", "/v1/models", **lower)[0] == 200, "the scheme has no case"


def test_a_browser_gets_past_the_key(small: Server) -> None:
    """What it asks before it may show the key, and a refusal that its page can read."""
    asks = {"Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang"}  # fmt: skip
    for origin, status in (("http://good.example", 200), ("http://evil.example", 400)):
        got, headers, content = small.send("OPTIONS", "/v1/completions", Origin=origin, **asks)
        assert got == status, content
        assert (headers.get("access-control-allow-origin") == origin) == (status == 200)
        if status == 200:
            assert "x-stainless-lang" in headers["access-control-allow-headers"]
        else:
            assert json.loads(content)["error"]["code"] == 400
    status, headers, content = small.send(
        "POST", "/v1/completions", SHORT, Origin="http://good.example", Authorization="Bearer no"
    )
    assert (status, headers["access-control-allow-origin"]) == (401, "http://good.example")


def test_full_queue_and_time_out(small: Server) -> None:
    """One runs, two wait, dozens of others are told to come again; those three run out of time."""
    small.headers = KEY
    small.idle()
    with ThreadPoolExecutor(3) as slow:
        held = [slow.submit(small.send, "POST", "/v1/completions", LONG) for _ in range(3)]
        until = time.monotonic() + 3
        while small.metric("xdlm_rows_waiting") < 2 and time.monotonic() < until:
            time.sleep(0.01)
        with ThreadPoolExecutor(8) as crowd:
            asked = [crowd.submit(small.send, "POST", "/v1/completions", SHORT) for _ in range(60)]
        for status, headers, content in (one.result() for one in asked):
            assert status == 429 and int(headers["retry-after"]) >= 1, content
            assert json.loads(content)["error"]["type"] == "rate_limit_error"
        assert [one.result()[0] for one in held] == [504] * 3
    assert small.post("/v1/completions", **SHORT)["choices"]


def test_patterns_keep_nobody_waiting(small: Server) -> None:
    """They have threads and a queue of their own, and run out of time as everything else."""
    small.headers = KEY
    small.idle()
    with ThreadPoolExecutor(24) as clients:
        began = time.monotonic()
        asked = [clients.submit(small.send, "POST", "/v1/infill", ENDLESS) for _ in range(24)]
        time.sleep(0.5)
        asking = time.monotonic()
        assert small.post("/v1/completions", **SHORT)["choices"]
        assert time.monotonic() - asking < 3
        answers = [one.result() for one in asked]
        assert time.monotonic() - began < 8
    statuses = [status for status, _, _ in answers]
    assert statuses.count(504) == 18 and statuses.count(429) == 6, statuses
    assert all(int(headers["retry-after"]) >= 1 for s, headers, _ in answers if s == 429)
    quick = {"template": "a <mask:2>", "blanks": [{"choices": ["a b"]}], "steps": 1}
    assert small.post("/v1/infill", **quick), "their threads are free again"


def test_patterns_of_clients_that_vanish_are_dropped(small: Server) -> None:
    small.headers = KEY
    body = json.dumps(ENDLESS).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in KEY.items())
    for _ in range(18):
        with socket.create_connection(("127.0.0.1", small.port), timeout=20) as client:
            client.sendall(
                f"POST /v1/infill HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{head}"
                "Content-Type: application/json\r\n\r\n".encode()
                + body
            )
            time.sleep(0.01)
    time.sleep(1)
    began = time.monotonic()
    quick = {"template": "a <mask:2>", "blanks": [{"choices": ["a c"]}], "steps": 1}
    assert small.post("/v1/infill", **quick)
    assert time.monotonic() - began < 2


def test_patterns_share_a_budget_and_are_kept(monkeypatch) -> None:
    from xdlm import load
    from xdlm.blanks import BlankRule
    from xdlm.errors import UserError
    from xdlm.serve import automata

    tokenizer, size = load("pocket", device="cpu").tokenizer, 2048
    monkeypatch.setattr(automata, "_ENTRIES", 8 * size)
    monkeypatch.setattr(automata, "MAX_LOOKED_AT", 100 * size)
    made = automata.Automata(tokenizer, size)
    states: list[int] = []
    first, second, none = BlankRule(regex="abc"), BlankRule(regex="xyz"), frozenset[int]()
    compiled = made.compiler(n=1, check=lambda: states.append(1))
    one = compiled(first, none, 2)
    seen = len(states)
    assert 3 <= seen <= 5 and compiled(first, none, 2) is one, "the same again is free"
    with pytest.raises(UserError, match="all blanks together are too large"):
        compiled(second, none, 2)

    def alone(rule: BlankRule, forbidden: frozenset[int]) -> int:
        """States that a request of its own had to look at."""
        before = len(states)
        made.compiler(n=1, check=lambda: states.append(1))(rule, forbidden, 2)
        return len(states) - before

    assert alone(first, none) == 0, "kept"
    assert alone(second, none) == seen, "each would do alone"
    assert alone(second, none) == 0 and alone(second, frozenset([5])) == seen, "banned ones count"
    assert alone(first, none) == seen, "of what is kept, the oldest goes first"
    with pytest.raises(UserError, match="for blanks of so many tokens"):
        made.compiler(n=30, check=lambda: None)(second, none, 2)

    def stop() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        made.compiler(n=1, check=stop)(BlankRule(regex="stop"), none, 2)


def test_scores_are_bounded_and_leave_room(small: Server) -> None:
    small.headers = KEY
    small.idle()
    long = "It was a dark night. " * 100
    status, _, content = small.send("POST", "/v1/score", {"input": [long] * 16, "draws": 64})
    assert status == 400 and "ask for less" in json.loads(content)["error"]["message"]
    with ThreadPoolExecutor(2) as clients:
        heavy = {"input": [long] * 6, "draws": 60}
        asked = [clients.submit(small.send, "POST", "/v1/score", heavy) for _ in range(2)]
        time.sleep(0.3)
        began = time.monotonic()
        assert small.post("/v1/completions", **{**SHORT, "steps": 2})["choices"]
        assert time.monotonic() - began < 3
        answers = [one.result() for one in asked]
        assert time.monotonic() - began < 8
    assert {status for status, _, _ in answers} == {504}
