"""Invented results."""

from __future__ import annotations

from dataclasses import replace

from xdlm.evaluation.records import EvalRecord

#: Mixing ratios, and the models of them.
RATIOS = {0.0: "a", 0.001: "b", 0.1: "c", 0.9: "d", 1.0: "e"}


def record(**changes: object) -> EvalRecord:
    fields: dict[str, object] = {
        "metric": "ppl", "value": 3.5, "stderr": 0.1, "n": 8, "seed": 0, "model": "m", "step": 5,
        "weights": "ema", "dtype": "float32", "config": {"a": 1}, "tokenizer_sha256": "t",
        "xdlm": "0", "commit": "c", "torch": "2", "device": "cpu",
    }  # fmt: skip
    return EvalRecord(**{**fields, **changes})


def of(kind: str, model: str, k: float | None = None, **changes: object) -> EvalRecord:
    return record(model=model, config={"process": {"kind": kind, "k": k}}, **changes)


def ppl(
    kind: str, model: str, value: float, data: str = "ptb:test", **changes: object
) -> EvalRecord:
    settings = {"data_sha256": data, "length": 128, **changes}
    return of(kind, model, value=value, data=data, **settings)


def gen(kind: str, model: str, steps: int, value: float, **changes: object) -> list[EvalRecord]:
    settings = {
        "steps": steps,
        "sampler": "thinned",
        "temperature": 1.0,
        "top_p": 1.0,
        "length": 128,
    }
    settings |= changes
    judged = {"judge": "j", "judge_sha256": "1", **settings}
    return [
        of(kind, model, metric="gen_ppl", value=value, **judged),
        of(kind, model, metric="entropy", value=3.0, **settings),
    ]


def real(metric: str, value: float, **changes: object) -> EvalRecord:
    about = {"data": "d", "data_sha256": "d", "length": 128, **changes}
    judged = {"judge": "j", "judge_sha256": "1"} if metric.endswith("ppl") else {}
    return of("masked", "a", metric=metric, value=value, **{**judged, **about})


def three_models() -> list[EvalRecord]:
    """All that any table or figure needs, with an early checkpoint of the first."""
    early = [replace(r, step=2) for r in of_ratio(0.0, "a")]
    return [*early, *of_ratio(0.0, "a"), *of_ratio(0.1, "b"), *of_ratio(1.0, "c")]


def course(model: str, *values: float, kind: str = "masked", **changes: object) -> list[EvalRecord]:
    steps = range(100, 100 * len(values) + 1, 100)
    return [
        ppl(kind, model, value, step=step, **changes)
        for step, value in zip(steps, values, strict=True)
    ]


def of_ratio(k: float, model: str, **changes: object) -> list[EvalRecord]:
    kind = {0: "masked", 1: "uniform"}.get(k, "mixed")
    about = {"k": k if kind == "mixed" else None, **changes}
    return [ppl(kind, model, 20 + k, **about), *gen(kind, model, 8, 9 - k, **about)]
