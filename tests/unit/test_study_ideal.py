"""What the page says of texts by ideal predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from studies import config, of, page_of_study, verdicts, whole

from xdlm import UserError
from xdlm.evaluation.records import EvalRecord
from xdlm.report.study import compose
from xdlm.report.study.collection import collect

ORIGIN = {"data": "corpus:train", "tokenizer": "pocket", "states": 8, "read": 1000}
LEVELS = {
    ("MDLM", "thinned", 4): 300.0, ("MDLM", "thinned", 256): 101.0, ("UDLM", "thinned", 4): 250.0,
    ("XDLM k=0.1", "thinned", 4): 270.0, ("XDLM k=0.1", "thinned", 256): 100.5,
    ("MDLM", "gumbel", 256): 80.0, ("XDLM k=0.1", "gumbel", 256): 90.0,
}  # fmt: skip
#: Of the bounds, and so of what each text came to.
SHARES = {"MDLM": 1.0, "XDLM k=0.1": 0.99, "UDLM": 1.01}
ROWS = [290.0 + 7 * (i % 5) for i in range(32)]
NEAR = "Given ideal predictions, the bound is within 3 % of MDLM's under every noise"


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


def bounds(shares: dict[str, float], rows: bool = True) -> list[EvalRecord]:
    """Whose texts are hard or easy for all alike."""
    known = {"law_ppl": 99.0, "excess_nats": 0.005, "excess_nats_stderr": 0.004, "vocabulary": 2048,
             "tokens": 32 * 64.0}  # fmt: skip
    return [
        of(method, "law_bound", 99.5 * share, 0, **about(method), stderr=5.0, draws=4, details=known,
           row_nats=[r + 64 * (share - 1) for r in ROWS] if rows else None)
        for method, share in shares.items()
    ]  # fmt: skip


def page(law: list[EvalRecord]) -> str:
    return page_of_study(replace(collect(whole()), law=law))


def test_the_page_tells_the_noise_from_what_is_learned() -> None:
    text = page([*drawn(LEVELS), *bounds(SHARES)])
    found, title = verdicts(text), "Given ideal predictions"
    assert found[NEAR] == "holds"
    lower = "XDLM k=0.1's texts have a lower perplexity than MDLM's"
    assert found[f"{title}, 4 steps: {lower}"] == "holds"
    assert f"{title}, 256 steps: {lower}" not in found  # which are the most
    law = "texts are within 3 % of the law's own perplexity, those of MDLM and of XDLM k=0.1"
    assert found[f"{title}, 256 steps: {law}"] == "not separated by the noise"
    noisy = f"{title}, drawn by float32 noise, 256 steps: MDLM's texts have a lower perplexity than"
    assert found[f"{noisy} XDLM k=0.1's"] == found[f"{noisy} the law says"] == "holds"
    assert "| MDLM, exact draws | 300.0 ± 3.0 | 101.0 ± 1.0 |" in text
    assert "| XDLM k=0.1 | -10.0 % ± 1.3 | -0.5 % ± 1.4 |" in text
    assert "| UDLM | 100.5 ± 5.0 | +1.0 % ± 0.0 | 99.00 | 0.005 ± 0.004 |" in text
    assert "markov-8: XDLM k=0.1 -1.0 % ± 0.0; UDLM +1.0 % ± 0.0" in text
    assert "Drawn from a known law" not in text  # which is of independent tokens
    assert "figures/ideal.png" not in text  # of two numbers of steps
    command = (
        "xdlm eval draws --law markov --data corpus:train --tokenizer pocket --states 8 --read 1000 "
        "--keep-law law-1.safetensors --process.kind masked --impl thinned --n 32 --length 64 "
        "--seed 0 --steps 4 256 --bound 32 --records results.jsonl"
    )
    assert command in text
    assert "xdlm eval draws --law law-1.safetensors --process.kind uniform --impl thinned" in text


def test_bounds_that_are_apart_or_unsure_are_told() -> None:
    """All read the same texts, so that what is hard for all of them does not count: without what each
    text came to, 5 % of error are too many."""
    apart = verdicts(page([*drawn(LEVELS), *bounds({**SHARES, "UDLM": 1.1})]))
    assert apart[NEAR] == "does not hold"
    unsure = verdicts(page([*drawn(LEVELS), *bounds(SHARES, rows=False)]))
    assert unsure[NEAR] == "not separated by the noise"
    assert NEAR not in verdicts(page(drawn(LEVELS)))


def test_texts_of_other_laws_do_not_compare() -> None:
    first, *others = drawn(LEVELS)
    with pytest.raises(UserError, match="the law markov-8: records differ in tokenizer_sha256"):
        page([replace(first, tokenizer_sha256="other"), *others])
    with pytest.raises(UserError, match="the law markov-8: no record says"):
        page(bounds(SHARES))
    with pytest.raises(UserError, match="several records of law_bound for MDLM"):
        page([*drawn(LEVELS), *bounds(SHARES), *bounds(SHARES)])


def test_what_only_one_method_was_drawn_in_is_not_compared() -> None:
    levels = {key: level for key, level in LEVELS.items() if key != ("XDLM k=0.1", "thinned", 4)}
    found = verdicts(page(drawn(levels)))
    assert not any("4 steps: XDLM" in claim for claim in found if claim.startswith("Given"))
    sure = {**LEVELS, ("XDLM k=0.1", "thinned", 256): 120.0}
    law = "texts are within 3 % of the law's own perplexity, those of MDLM and of XDLM k=0.1"
    assert (
        verdicts(page(drawn(sure)))[f"Given ideal predictions, 256 steps: {law}"] == "does not hold"
    )


def test_curves_are_drawn(tmp_path: Path) -> None:
    levels = {**LEVELS, ("MDLM", "thinned", 16): 150.0, ("UDLM", "thinned", 16): 140.0}
    study = replace(collect(whole()), law=drawn(levels))
    text, plots = compose(study, "results", "RESULTS.md")
    assert "figures/ideal.png" in text
    plots["ideal"](tmp_path / "ideal.png")
    assert 3_000 < (tmp_path / "ideal.png").stat().st_size < 100_000
