"""What belongs together: names of models, their last checkpoints, and what must agree between records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from xdlm.config import ProcessConfig, from_tree
from xdlm.errors import UserError
from xdlm.evaluation.generation import N_GRAMS
from xdlm.evaluation.records import EvalRecord
from xdlm.noise import Stationary

#: What must agree between any two records of a table, beside what its columns say.
ALWAYS = ("dtype", "weights", "tokenizer_sha256", "length")
SAMPLING = ("sampler", "temperature", "top_p", "n")
#: What is shown of generated text, and under which heading.
GENERATED = {
    "gen_ppl": "perplexity",
    "entropy": "entropy",
    **{f"distinct_{n}": f"distinct-{n}" for n in N_GRAMS},
    "mauve": "MAUVE",
}
#: What is shown of generated images.
PAINTED = {
    "fid": "FID", "kid": "KID", "precision": "precision", "recall": "recall",
    "inception_score": "Inception Score",
}  # fmt: skip
#: The rows of real text that generated text is set beside.
REAL = {"real": "real text", "real_shuffled": "real text, shuffled"}
_NAMES = {
    "masked": "MDLM", "uniform": "UDLM", "mixed": "XDLM", "gidd": "GIDD", "autoregressive": "AR",
}  # fmt: skip


def method_of(record: EvalRecord) -> str:
    """The name of the method in the papers, with its mixing ratio."""
    tree = record.config.get("process")
    return "?" if tree is None else _method_of_tree(json.dumps(tree))


@cache
def _method_of_tree(tree: str) -> str:
    """A page asks a thousand times for each of a few."""
    return method_name(from_tree(ProcessConfig, json.loads(tree), "config.process"))


def method_name(process: ProcessConfig) -> str:
    """The same of a model's own configuration."""
    if process.kind != "mixed":
        return _NAMES.get(process.kind, process.kind)
    built = process.build(process.vocab(2))
    assert isinstance(built, Stationary)
    return f"XDLM k={built.k:g}"


def ratio(record: EvalRecord) -> float | None:
    """The mixing ratio, 0 for MDLM and 1 for UDLM; None for what is not on this scale (GIDD)."""
    if "process" not in record.config:
        return None
    config = from_tree(ProcessConfig, record.config["process"], "config.process")
    process = config.build(config.vocab(2))
    return process.k if isinstance(process, Stationary) else None


def labels(records: Sequence[EvalRecord], *, steps: bool = False) -> Callable[[EvalRecord], str]:
    """Names for the models of some records: their methods, where that tells them apart. With `steps`
    the training step too, where models are not all at the same one."""
    models: dict[str, set[str]] = {}
    for record in records:
        models.setdefault(method_of(record), set()).add(record.model)
    steps = steps and len({record.step for record in records}) > 1

    def label(record: EvalRecord) -> str:
        method = method_of(record)
        about = [record.model] if len(models[method]) > 1 else []
        about += [f"step {record.step:,}"] if steps else []
        return f"{method} ({', '.join(about)})" if about else method

    return label


def latest(records: Sequence[EvalRecord]) -> list[EvalRecord]:
    """Of each model what was measured at its last training step, be it of text or of generated text; what
    came before is for dynamics to show."""
    found = [record for record in records if record.metric in ("ppl", *GENERATED)]
    last: dict[str, int] = {}
    for record in found:
        last[record.model] = max(record.step, last.get(record.model, 0))
    return [record for record in found if record.step == last[record.model]]


def judge_of(records: Sequence[EvalRecord]) -> str:
    return next((record.judge for record in records if record.judge is not None), "none")


def real_records(records: Sequence[EvalRecord]) -> list[EvalRecord]:
    """What was found of real text, as it is and shuffled, that may stand beside the generated texts:
    under the same judge."""
    generated = [r for r in records if r.metric in GENERATED]
    judges = {r.judge_sha256 for r in generated}
    found = [r for r in records if _beside(r) and generated and r.judge_sha256 in {None, *judges}]
    check_alike(found, ("data_sha256", "n"), "real text")
    if found:
        check_alike([*found, *generated], ("tokenizer_sha256", "length"), "real text")
    return found


def real_text(records: Sequence[EvalRecord], kind: str = "real") -> dict[str, EvalRecord]:
    """Of those, the ones of one kind (see `REAL`), by the metric of generated text they stand beside."""
    found: dict[str, EvalRecord] = {}
    for record in real_records(records):
        if (place := _beside(record)) and place[0] == kind:
            found.setdefault(place[1], record)
    return found


def _beside(record: EvalRecord) -> tuple[str, str] | None:
    """Which kind of real text a record is of, and the metric of generated text that it stands beside."""
    for kind in REAL:
        for metric in GENERATED:
            if record.metric == f"{kind}_{metric.removeprefix('gen_')}":
                return kind, metric
    return None


def check_alike(records: Sequence[EvalRecord], fields: Sequence[str], what: str) -> None:
    """Refuse to compare what does not compare."""
    for record in records[1:]:
        for name in fields:
            first, other = getattr(records[0], name), getattr(record, name)
            if first != other:
                raise UserError(
                    f"{what}: records differ in {name} ({_short(first)} for {records[0].model}, "
                    f"{_short(other)} for {record.model}); they do not belong in one table"
                )


def check_perplexity(records: Sequence[EvalRecord]) -> None:
    _check_known(records, "data")
    check_alike(records, ALWAYS, "perplexity")
    for text in dict.fromkeys(r.data for r in records):
        own = [r for r in records if r.data == text]
        check_alike(own, ("data_sha256", "n"), f"perplexity of {text}")


def check_generation(records: Sequence[EvalRecord]) -> None:
    _check_known(records, "steps")
    check_alike(records, (*ALWAYS, *SAMPLING), "generated text")
    judged = [r for r in records if r.judge is not None]
    check_alike(judged, ("judge", "judge_sha256"), "generated text")
    compared = [r for r in records if r.metric == "mauve"]
    check_alike(compared, ("data_sha256",), "MAUVE")


def _check_known(records: Sequence[EvalRecord], name: str) -> None:
    for record in records:
        if getattr(record, name) is None:
            raise UserError(
                f"a record of {record.metric} for {record.model} does not say its {name}"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "..."
