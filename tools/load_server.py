"""How a server behaves under load, as ratios in one run: clients one at a time and many at once, their
latency, a queue that is full, and memory.

    python tools/load_server.py --clients 16 --requests 64 --tokens 16 --steps 16
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any


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

    def ask(self, **body: Any) -> tuple[int, float]:
        """Status and seconds of one completion."""
        began = time.perf_counter()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), head)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status, time.perf_counter() - began

    def megabytes(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default in (
        ("clients", 16),
        ("requests", 64),
        ("tokens", 16),
        ("steps", 16),
        ("flood", 10_000),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="pocket")
    options = parser.parse_args()
    body = {"prompt": "It was", "max_tokens": options.tokens, "steps": options.steps}
    server = Server("--model", options.model)
    server.ask(**body)
    before = server.megabytes()

    def many(clients: int, requests: int) -> tuple[float, list[float]]:
        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(lambda seed: server.ask(**body, seed=seed), range(requests)))
        assert {status for status, _ in answers} == {200}, Counter(status for status, _ in answers)
        return requests / (time.perf_counter() - began), sorted(seconds for _, seconds in answers)

    alone, single = many(1, max(4, options.requests // 4))
    together, crowd = many(options.clients, options.requests)
    print(f"one at a time     {alone:8.2f} requests/s   p95 {_p95(single):.3f} s")
    print(
        f"{options.clients:>2} at once        {together:8.2f} requests/s   p95 {_p95(crowd):.3f} s"
    )
    print(f"ratio             {together / alone:8.2f}")
    print(f"memory            {before:8.1f} MB before, {server.megabytes():.1f} MB after")
    print(f"exit code         {server.stop():8d}")
    _flood(options)


def _flood(options: argparse.Namespace) -> None:
    """Requests against a queue that is full."""
    server = Server(
        "--model", options.model, "--max-active", "1", "--max-waiting", "1", "--timeout", "600"
    )
    with ThreadPoolExecutor(2 + options.clients) as pool:
        for _ in range(2):
            pool.submit(server.ask, max_tokens=500, steps=1000)
            time.sleep(1)
        before, began = server.megabytes(), time.perf_counter()
        flood = pool.map(lambda _: server.ask(steps=1)[0], range(options.flood))
        statuses = Counter(flood)
        seconds = time.perf_counter() - began
        print(f"full queue        {dict(statuses)} in {seconds:.1f} s")
        print(f"memory            {before:8.1f} MB before, {server.megabytes():.1f} MB after")
        server.process.kill()


def _p95(seconds: list[float]) -> float:
    return seconds[int(0.95 * (len(seconds) - 1))]


if __name__ == "__main__":
    main()
