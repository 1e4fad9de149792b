"""How a server behaves under load, as ratios in one run: clients one at a time and many at once, their
latency, memory over many requests, and a queue that is full.

    python tools/load_server.py
    python tools/load_server.py --clients 16 --requests 64 --rounds 5 --many 2000 --flood 10000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

OPTIONS = {
    "clients": (16, "clients at once"),
    "requests": (
        64,
        "requests of all clients together in a round; one alone sends a quarter of them",
    ),
    "rounds": (5, "rounds of one client alone and then of many; medians are told"),
    "tokens": (16, "new tokens of a request"),
    "steps": (16, "steps of a request"),
    "many": (2000, "requests over which memory is watched; 0 for none"),
    "flood": (10_000, "requests against a full queue; 0 for none"),
}


class Server:
    """`xdlm serve` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "xdlm.cli.main", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r":(\d+) \(", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line}")
        self.port = int(found[1])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()

    def ask(self, **body: Any) -> tuple[int, float]:
        """Status and seconds of one completion."""
        began = time.perf_counter()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), head)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status != 429 or int(answer.headers["Retry-After"]) >= 1
        return answer.status, time.perf_counter() - began

    def many(self, clients: int, requests: int, body: dict[str, Any]) -> tuple[float, list[float]]:
        """Requests per second, and the seconds that each took."""
        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(lambda seed: self.ask(**body, seed=seed), range(requests)))
        seconds = time.perf_counter() - began
        assert {status for status, _ in answers} == {200}, Counter(status for status, _ in answers)
        return requests / seconds, [took for _, took in answers]

    def megabytes(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, (default, what) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    parser.add_argument("--model", default="pocket")
    options = parser.parse_args()
    body = {"prompt": "It was", "max_tokens": options.tokens, "steps": options.steps}
    with Server("--model", options.model) as server:
        server.many(options.clients, 2 * options.clients, body)  # batch sizes are tried once
        _throughput(server, options, body)
        if options.many:
            _memory(server, options, body)
        print(f"exit code         {server.stop():8d}", flush=True)
    if options.flood:
        _flood(options)


def _throughput(server: Server, options: argparse.Namespace, body: dict[str, Any]) -> None:
    alone, together, ratios = list[float](), list[float](), list[float]()
    single, crowd = list[float](), list[float]()
    for _ in range(options.rounds):
        one, took = server.many(1, max(4, options.requests // 4), body)
        single += took
        all_, took = server.many(options.clients, options.requests, body)
        crowd += took
        alone.append(one)
        together.append(all_)
        ratios.append(all_ / one)
    middle = statistics.median
    print(f"one at a time     {middle(alone):8.2f} requests/s   p95 {_p95(single):.3f} s")
    print(
        f"{options.clients:>2} at once        {middle(together):8.2f} requests/s   p95 {_p95(crowd):.3f} s"
    )
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"ratio             {middle(ratios):8.2f} (rounds: {shown})", flush=True)


def _memory(server: Server, options: argparse.Namespace, body: dict[str, Any]) -> None:
    """Of the server, at every tenth of many requests."""
    seen = [server.megabytes()]
    for _ in range(10):
        server.many(options.clients, options.many // 10, body)
        seen.append(server.megabytes())
    shown = " ".join(f"{size:.0f}" for size in seen)
    print(f"memory            {shown} MB over {options.many} requests", flush=True)


def _flood(options: argparse.Namespace) -> None:
    """Requests against a queue that is full."""
    small = (
        "--model",
        options.model,
        "--max-active",
        "1",
        "--max-waiting",
        "1",
        "--timeout",
        "600",
    )
    with ThreadPoolExecutor(2 + options.clients) as pool, Server(*small) as server:
        held = []
        for _ in range(2):
            held.append(pool.submit(_held, server))
            time.sleep(1)
        before, began = server.megabytes(), time.perf_counter()
        statuses = Counter(pool.map(lambda _: server.ask(steps=1)[0], range(options.flood)))
        seconds = time.perf_counter() - began
        assert not any(one.done() for one in held), "the queue was full all the time"
        print(f"full queue        {dict(statuses)} in {seconds:.1f} s")
        print(f"memory            {before:.0f} MB before, {server.megabytes():.0f} MB after")


def _held(server: Server) -> None:
    """A request that outlasts the flood; its connection breaks at the end."""
    with contextlib.suppress(OSError):
        server.ask(max_tokens=1000, steps=1000)


def _p95(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.95 * (len(seconds) - 1))]


if __name__ == "__main__":
    main()
