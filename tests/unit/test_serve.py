"""What the real server answers over real sockets: texts, streams, steps, scores, and its page."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from serving import SHORT, Server

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


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
