"""What the server did, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from xdlm.serve.service import Service
from xdlm.serve.web.guard import Guard

_OUTCOMES = ("accepted", "refused", "finished", "cancelled", "timed_out", "failed")


def exposition(service: Service, guard: Guard) -> str:
    return "\n".join(_lines(service, guard)) + "\n"


def _lines(service: Service, guard: Guard) -> Iterator[str]:
    engines = [(name, one.engine) for name, one in service.served.items()]
    yield from _metric(
        "xdlm_http_responses_total", "counter", "Answers by path and status.",
        ((f'path="{path}",status="{status}"', n) for (path, status), n in guard.answered.items()),
    )  # fmt: skip
    yield from _metric(
        "xdlm_http_seconds_total", "counter", "Seconds spent on answers, by path.",
        ((f'path="{path}"', round(seconds, 6)) for path, seconds in guard.seconds.items()),
    )  # fmt: skip
    yield from _metric(
        "xdlm_requests_total", "counter", "What became of requests to a model.",
        ((f'model="{_quoted(name)}",outcome="{outcome}"', engine.counts[outcome])
         for name, engine in engines for outcome in _OUTCOMES),
    )  # fmt: skip
    for metric, kind, what, value in (
        ("xdlm_rows_waiting", "gauge", "Texts in the queue.", lambda e: e.waiting),
        ("xdlm_rows_active", "gauge", "Texts that are being written.", lambda e: e.active),
        ("xdlm_turns_total", "counter", "Steps of the engine.", lambda e: e.counts["turns"]),
        ("xdlm_rows_run_total", "counter", "Rows through the model.", lambda e: e.batcher.rows_run),
        ("xdlm_rows_filled_up_total", "counter", "Rows that only filled up a batch.",
         lambda e: e.batcher.rows_filled_up),
    ):  # fmt: skip
        labelled = ((f'model="{_quoted(name)}"', value(engine)) for name, engine in engines)
        yield from _metric(metric, kind, what, labelled)


def _metric(name: str, kind: str, what: str, values: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP {name} {what}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        yield f"{name}{{{labels}}} {value}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
