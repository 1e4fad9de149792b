"""The real server over real sockets: answers, streams, errors, faults, and its end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from serving import Server, started

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from started(
        "--model", "pocket", "pocket-mdlm", "--max-length", "160", "--max-body", "65536"
    )


SHORT: dict[str, Any] = {"prompt": "It was", "max_tokens": 12, "steps": 6, "seed": 3}
LONG: dict[str, Any] = {"prompt": "It was", "max_tokens": 120, "steps": 1000}


def test_models_health_and_metrics(server: Server) -> None:
    models = json.loads(server.send("GET", "/v1/models")[2])["data"]
    assert [m["id"] for m in models] == ["pocket", "pocket-mdlm"]
    assert [(m["noise"], m["max_length"]) for m in models] == [("mixed", 160), ("masked", 160)]
    assert models[0]["xdlm"]["max_tokens"] == 160 and models[0]["xdlm"]["max_steps"] == 1024
    assert json.loads(server.send("GET", "/v1/models/pocket-mdlm")[2])["id"] == "pocket-mdlm"
    assert json.loads(server.send("GET", "/healthz")[2]) == {"status": "ok"}
    before = server.metric("xdlm_requests_total", model="pocket", outcome="finished")
    server.post("/v1/completions", **SHORT)
    after = server.metric("xdlm_requests_total", model="pocket", outcome="finished")
    assert after == before + 1
    assert server.metric("xdlm_http_responses_total", path="/v1/completions", status="200") >= 1


def test_completion_is_the_librarys(server: Server) -> None:
    from xdlm import load

    expected = load("pocket", device="cpu").complete(["It was"] * 2, new_tokens=12, steps=6, seed=3)
    answer = server.post("/v1/completions", **SHORT, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [c.text for c in expected]
    assert answer["object"] == "text_completion" and answer["seed"] == 3
    assert answer["usage"]["prompt_tokens"] == 2


def test_same_seed_same_text_in_a_crowd(server: Server) -> None:
    """Sixteen clients at once, of two models and samplers: each gets what it gets alone."""
    asked = [
        {**SHORT, "seed": i % 4, "model": ("pocket", "pocket-mdlm")[i % 2],
         "sampler": ("ancestral", "confidence")[i // 8], "max_tokens": 12 + i % 3}
        for i in range(16)
    ]  # fmt: skip

    def text(body: dict[str, Any]) -> str:
        return server.post("/v1/completions", **body)["choices"][0]["text"]

    alone = [text(body) for body in asked]
    with ThreadPoolExecutor(16) as clients:
        assert list(clients.map(text, asked)) == alone
    unseeded = [server.post("/v1/completions", prompt="It", steps=4) for _ in range(2)]
    assert unseeded[0]["seed"] != unseeded[1]["seed"], "by chance, and told"
    again = server.post("/v1/completions", prompt="It", steps=4, seed=unseeded[0]["seed"])
    assert again["choices"] == unseeded[0]["choices"]


def test_settings_reach_the_sampler(server: Server) -> None:
    plain = server.post("/v1/completions", **SHORT)["choices"][0]["text"]
    for change in (
        {"seed": 4}, {"steps": 3}, {"temperature": 0.1}, {"top_p": 0.2}, {"k": 0.9}, {"last": "argmax"},
        {"sampler": "confidence"}, {"sampler": "confidence", "guidance": 3.0},
        {"sampler": "confidence", "block_length": 3}, {"prompt": "She was"}, {"model": "pocket-mdlm"},
    ):  # fmt: skip
        assert server.post("/v1/completions", **{**SHORT, **change})["choices"][0]["text"] != plain
    many = server.post("/v1/completions", **{**SHORT, "prompt": ["It was", "He"], "n": 2})
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert many["choices"][0]["text"] == plain


def test_stop_cuts_the_text(server: Server) -> None:
    whole = server.post("/v1/completions", **SHORT)["choices"][0]
    assert whole["finish_reason"] == "length"
    stop = whole["text"][4:7]
    cut = server.post("/v1/completions", **SHORT, stop=["never there", stop])["choices"][0]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "extra", [{}, {"model": "pocket-mdlm"}, {"sampler": "confidence", "k": 0.0}]
)
def test_stream_adds_up_to_the_answer(server: Server, extra: dict[str, Any]) -> None:
    body = {**SHORT, "n": 2, **extra}
    whole = server.post("/v1/completions", **body)
    events = server.events("/v1/completions", **body, stream_options={"include_usage": True})
    texts = {0: "", 1: ""}
    early = 0
    for event in events:
        for choice in event["choices"]:
            early += bool(choice["text"]) and choice["finish_reason"] is None
            texts[choice["index"]] += choice["text"]
    assert texts == {c["index"]: c["text"] for c in whole["choices"]}
    steps = [e["xdlm"] for e in events if "xdlm" in e]
    assert {s["step"] for s in steps} == set(range(steps[0]["steps"] + 1))
    assert all(p is None or 0 <= p <= 1 for s in steps for _, _, p in s["changes"])
    assert events[-1]["usage"] == whole["usage"]
    # Only where written tokens stay can a part be told before the end.
    assert bool(early) == bool(extra)


def test_openai_client_completes_and_streams(server: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0
    )
    assert [model.id for model in client.models.list()] == ["pocket", "pocket-mdlm"]
    asked = {"model": "pocket", "prompt": "It was", "max_tokens": 12, "seed": 3}
    own = {"steps": 6}
    answer = client.completions.create(**asked, extra_body=own)
    assert answer.choices[0].text == server.post("/v1/completions", **SHORT)["choices"][0]["text"]
    text = ""
    for part in client.completions.create(**asked, stream=True, extra_body=own):
        text += part.choices[0].text  # the usual loop: every event has a choice
    assert text == answer.choices[0].text
    counting = client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body=own
    )
    *_, last = counting
    assert (last.choices, last.usage) == ([], answer.usage)
    with pytest.raises(openai.BadRequestError, match="steps must lie in"):
        client.completions.create(**asked, extra_body={"steps": 5000})
    with pytest.raises(openai.NotFoundError, match="did you mean 'pocket'"):
        client.completions.create(**{**asked, "model": "pockt"})


def test_settings_of_openai_that_ask_for_nothing(server: Server) -> None:
    plain = server.post("/v1/completions", **SHORT)["choices"]
    neutral = {
        "logprobs": None, "echo": False, "best_of": 1, "presence_penalty": 0, "suffix": None, "n": None,
        "frequency_penalty": 0.0, "user": "me", "logit_bias": {}, "temperature": None, "top_p": None,
        "stop": None, "stream": None, "stream_options": None, "model": None, "sampler": None,
    }  # fmt: skip
    assert server.post("/v1/completions", **SHORT, **neutral)["choices"] == plain
    asks: dict[str, Any] = {
        "logprobs": 2, "echo": True, "best_of": 3, "presence_penalty": 1, "suffix": "end",
        "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "stream_options": {"include_usage": True},
    }  # fmt: skip
    for name, value in asks.items():
        status, _, content = server.send("POST", "/v1/completions", {**SHORT, name: value})
        error = json.loads(content)["error"]
        assert status == 400 and "leave it out" in error["message"], error
        assert name in error["message"] and error["param"] in (name, None)


def test_infill_with_constraints(server: Server, tmp_path: Path) -> None:
    from xdlm.report import read_recording

    answer = server.post(
        "/v1/infill", template="The <mask:4> said <mask:3> and <mask:2>.", n=3, seed=1, steps=5,
        blanks=[{"choices": ["old man", "king."]}, {"regex": "[a-z]+"}], banned=[0, " the"],
        forced={"10": 5}, trajectory=True,
    )  # fmt: skip
    for choice in answer["choices"]:
        assert re.fullmatch(
            r"The ?(old man|king\.) said ?[a-z]+ and.*\.", choice["text"], re.DOTALL
        )
        assert choice["tokens"][10] == 5 and 0 not in choice["tokens"]
    (tmp_path / "run.json").write_text(json.dumps(answer["trajectory"]))
    path = read_recording(tmp_path / "run.json").trajectory
    assert path.frames[-1].tolist() == [choice["tokens"] for choice in answer["choices"]]


@pytest.mark.parametrize(
    "extra", [{}, {"model": "pocket-mdlm"}, {"k": 0.5}, {"sampler": "confidence"}]
)
def test_steps_add_up_to_the_text(server: Server, extra: dict[str, Any]) -> None:
    body = {"template": "The <mask:9>.", "seed": 1, "steps": 4, **extra}
    events = server.events("/v1/infill", **body)
    steps = [event["xdlm"] for event in events if "xdlm" in event]
    assert [step["step"] for step in steps] == list(range(steps[0]["steps"] + 1))
    assert [step["time"] for step in steps] == sorted((s["time"] for s in steps), reverse=True)
    first = steps[0]
    state = [text for _, text, _ in first["changes"]]
    assert len(first["open"]) == 9
    assert all(i in first["open"] for i, text in enumerate(state) if text is None)
    for step in steps[1:]:
        for position, text, _ in step["changes"]:
            assert state[position] != text and position in first["open"]
            state[position] = text
    assert None not in state
    final = next(e for e in events if e["choices"] and e["choices"][0]["finish_reason"])
    assert "".join(state) == final["choices"][0]["text"]


def test_trajectories_as_files(server: Server, tmp_path: Path) -> None:
    from xdlm.report import read_recording

    body = {"template": "The <mask:9>.", "seed": 1, "steps": 4}
    tokens = server.post("/v1/infill", **body)["choices"][0]["tokens"]
    for name, start in (
        ("json", b"{"),
        ("html", b"<!doctype html>"),
        ("svg", b"<svg"),
        ("gif", b"GIF8"),
    ):
        status, headers, content = server.send("POST", "/v1/trajectory", {**body, "format": name})
        assert status == 200 and content.startswith(start), content[:200]
        assert name in headers["content-type"]
        if name == "json":
            (tmp_path / "run.json").write_bytes(content)
    path = read_recording(tmp_path / "run.json").trajectory
    assert path.frames[-1].tolist() == [tokens]
    assert server.send("POST", "/v1/trajectory", {**body, "format": "exe"})[0] == 400
    assert server.send("POST", "/v1/trajectory", {**body, "stream": True})[0] == 400


def test_the_page_asks_for_nothing_from_outside(server: Server) -> None:
    status, headers, page = server.send("GET", "/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.decode())
    assert len(parts) >= 4
    for _ in range(20):  # what a module imports, to the end
        found = {p for part in parts for p in _imports(server, part)} - set(parts)
        if not found:
            break
        parts += sorted(found)
    assert "page/chart.js" in parts
    for path in ("/page/nothing.js", "/page/../app.py", "/page/%2e%2e/app.py"):
        assert server.send("GET", path)[0] == 404


def _imports(server: Server, part: str) -> list[str]:
    assert part.startswith("page/"), part
    status, headers, content = server.send("GET", f"/{part}")
    assert status == 200 and headers["x-content-type-options"] == "nosniff", part
    assert not re.findall(
        r"(?:https?:)?//[a-z]+\.[a-z]+", content.decode().replace("www.w3.org", "")
    )
    return [f"page/{name}" for name in re.findall(r'from "\./([\w.]+)"', content.decode())]


def test_score(server: Server) -> None:
    answer = server.post("/v1/score", input=["It was a dark night.", "xq zj vv kk qq"], draws=8)
    first, second = answer["data"]
    assert 0 < first["nats_per_token"] < second["nats_per_token"]
    assert first["nats_stderr"] > 0 and first["tokens"] > 4


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


def test_nothing_for_other_origins(server: Server) -> None:
    _, headers, _ = server.send("GET", "/v1/models", Origin="http://evil.example")
    assert not any(name.startswith("access-control") for name in headers)


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
    """One runs, two wait, hundreds of others are told to come again; those three run out of time."""
    small.headers = KEY
    small.idle()
    with ThreadPoolExecutor(3) as slow:
        held = [slow.submit(small.send, "POST", "/v1/completions", LONG) for _ in range(3)]
        until = time.monotonic() + 3
        while small.metric("xdlm_rows_waiting") < 2 and time.monotonic() < until:
            time.sleep(0.01)
        with ThreadPoolExecutor(8) as crowd:
            asked = [crowd.submit(small.send, "POST", "/v1/completions", SHORT) for _ in range(300)]
        for status, headers, content in (one.result() for one in asked):
            assert status == 429 and int(headers["retry-after"]) >= 1, content
            assert json.loads(content)["error"]["type"] == "rate_limit_error"
        assert [one.result()[0] for one in held] == [504] * 3
    assert small.post("/v1/completions", **SHORT)["choices"]


#: Thousands of states: whether there was an a thirteen characters ago.
ENDLESS = {"template": "<mask:8>", "blanks": [{"regex": "(.|\\n)*a(.|\\n){12}"}], "steps": 1}


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


def test_what_is_not_http_is_told_so_in_json(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(b"HELLO\r\n\r\n")
        answer = b""
        while part := client.recv(4096):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head and b"application/json" in head
    assert json.loads(body)["error"]["code"] == 400


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
    from xdlm.serve.engine import Request, Ticket
    from xdlm.serve.web.streams import finished

    class Client:
        async def is_disconnected(self) -> bool:
            return False

    asked = Request([None], SamplerConfig())
    sick, well = (Ticket(asked, Counter()) for _ in range(2))

    async def wait() -> None:
        asyncio.get_running_loop().call_later(0.05, sick._fail, RuntimeError("no"), "failed")
        await finished([well, sick], Client())  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match="no"):
        run_apart(wait())
    assert well.done, "nobody waits for it any more"


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


def test_sigterm_finishes_what_was_begun() -> None:
    server = Server()
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
        assert server.process.wait(30) == 0 and time.monotonic() - began < 5
    *_, last = stream.decode().strip().split("\n\n")
    assert status == 200 and json.loads(last.removeprefix("data: "))["error"]["code"] == 503
    for status, headers, content in others:
        assert (status, headers["content-type"]) == (503, "application/json"), content
        assert "shutting down" in json.loads(content)["error"]["message"]
    assert server.process.stderr is not None
    assert server.process.stderr.read() == "", "no complaint"
    server.process.stderr.close()


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


def test_documented_clients_work(server: Server) -> None:
    pytest.importorskip("openai")
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) == 4
    for program in programs:
        program = program.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        printed: list[Any] = []
        exec(program, {"print": printed.append})
        assert printed and all(printed)


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


def test_small_answers_leave_at_once(server: Server) -> None:
    """On one connection, without the 40 ms that an unacknowledged packet would cost each of them."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    seconds = []
    for _ in range(15):
        began = time.perf_counter()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - began)
    connection.close()
    assert sorted(seconds)[7] < 0.03
