"""What the page says of texts by ideal predictions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from studies import config, of, page_of_study, verdicts, whole

from xdlm import UserError
from xdlm.evaluation.records import EvalRecord
from xdlm.report.study.collection import collect

ORIGIN = {"data": "corpus:train", "tokenizer": "pocket", "states": 8, "read": 1000}
LEVELS = {
    ("MDLM", "thinned", 4): 300.0, ("MDLM", "thinned", 256): 101.0, ("UDLM", "thinned", 4): 250.0,
    ("XDLM k=0.1", "thinned", 4): 270.0, ("XDLM k=0.1", "thinned", 256): 100.5,
    ("MDLM", "gumbel", 256): 80.0, ("XDLM k=0.1", "gumbel", 256): 90.0,
}  # fmt: skip
EXCESS = {"MDLM": 0.001, "XDLM k=0.1": -0.002, "UDLM": 0.003}


def about(method: str) -> dict[str, object]:
    return {
        "model": "markov-8", "data": "corpus:train", "length": 64, "n": 32,
        "config": {"process": config(method)["process"], "law": ORIGIN},
    }  # fmt: skip


def drawn(levels: dict[tuple[str, str, int], float]) -> list[EvalRecord]:
    """Perplexity, and an entropy with it, by method, sampler and steps."""
    found = []
    for (method, sampler, steps), level in levels.items():
        how = {
            **about(method),
            "steps": steps,
            "sampler": sampler,
            "temperature": 1.0,
            "top_p": 1.0,
        }
        known = {"law_ppl": 100.0, "law_ppl_stderr": 0.5, "law_entropy": 4.0, "vocabulary": 2048}
        found += [
            of(method, "law_ppl", level, 0, **how, stderr=0.01 * level, details=known),
            of(method, "law_entropy", 4.0, 0, **how, stderr=0.01, details=known),
        ]
    return found


def bounds(excess: dict[str, float], error: float = 0.001) -> list[EvalRecord]:
    known = {"law_ppl": 99.0, "excess_nats_stderr": error, "vocabulary": 2048}
    return [
        of(method, "law_bound", 99.5, 0, **about(method), stderr=1.0, draws=4,
           details={**known, "excess_nats": off})
        for method, off in excess.items()
    ]  # fmt: skip


def page(law: list[EvalRecord]) -> str:
    return page_of_study(replace(collect(whole()), law=law))


def test_the_page_tells_the_noise_from_what_is_learned() -> None:
    text = page([*drawn(LEVELS), *bounds(EXCESS)])
    found, title = verdicts(text), "Given ideal predictions"
    tight = f"{title}, the bound is tight under every noise, within 0.01 nats a token"
    assert found[tight] == "holds"
    assert found[f"{title}, 4 steps: XDLM k=0.1 writes better than MDLM"] == "holds"
    many = f"{title}, 256 steps: MDLM writes better than XDLM k=0.1"
    assert found[many] == "not separated by the noise"
    noisy = f"{title}, drawn by float32 noise, 256 steps: MDLM writes better than XDLM k=0.1"
    assert found[noisy] == "holds"
    assert "| MDLM, exact draws | 300.0 ± 3.0 | 101.0 ± 1.0 |" in text
    assert "| XDLM k=0.1 | -10.0 % ± 1.3 | -0.5 % ± 1.4 |" in text
    assert "| UDLM | 99.50 ± 1.00 | 99.00 | 0.0030 ± 0.0010 |" in text
    assert "furthest off is UDLM by 0.0030 ± 0.0010" in text
    assert "Drawn from a known law" not in text  # which is of independent tokens
    assert "figures/ideal.png" in text
    command = (
        "xdlm eval draws --law markov --data corpus:train --tokenizer pocket --states 8 --read 1000 "
        "--process.kind masked --impl thinned --n 32 --length 64 --seed 0 --steps 4 256 --bound 32 "
        "--records results.jsonl"
    )
    assert command in text


def test_bounds_that_are_loose_or_unsure_are_told() -> None:
    tight = (
        "Given ideal predictions, the bound is tight under every noise, within 0.01 nats a token"
    )
    loose = verdicts(page([*drawn(LEVELS), *bounds({**EXCESS, "UDLM": 0.02})]))
    assert loose[tight] == "does not hold"
    unsure = verdicts(page([*drawn(LEVELS), *bounds(EXCESS, error=0.01)]))
    assert unsure[tight] == "not separated by the noise"
    assert tight not in verdicts(page(drawn(LEVELS)))


def test_texts_of_other_laws_do_not_compare() -> None:
    first, *others = drawn(LEVELS)
    with pytest.raises(UserError, match="the law markov-8: records differ in tokenizer_sha256"):
        page([replace(first, tokenizer_sha256="other"), *others])
    with pytest.raises(UserError, match="several records of law_bound for MDLM"):
        page([*drawn(LEVELS), *bounds(EXCESS), *bounds(EXCESS)])
