"""The same methods under another recipe, and what adaptation comes to where the paper looks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from studies import RUNS, config, gen, page_of, page_of_study, ppl, verdicts, whole

from xdlm import UserError
from xdlm.evaluation.records import EvalRecord, append_records
from xdlm.report.study import read_study
from xdlm.report.study.collection import collect, with_otherwise, with_readapted

SHRINKS = (
    "Under the weights `dynamic`: the gap from MDLM to XDLM k=0.1 is smaller after 262 M tokens than "
    "after 131 M"
)


def by_bound(step: int, mixed: float) -> list[EvalRecord]:
    found = []
    for method, value in (("MDLM", 100.0), ("XDLM k=0.1", mixed)):
        own = config(method, steps=step)
        about = {"config": {**own, "loss": {**own["loss"], "weighting": "dynamic"}}}
        found += [ppl(method, value, step=step, **about)]
        found += [r for n in (8, 1024) for r in gen(method, value, n, step, **about)]
    return found


def test_gaps_of_other_recipes_stand_beside() -> None:
    study = with_otherwise(collect(whole()), "bound", collect(by_bound(2000, 130.0)))
    page = page_of_study(with_otherwise(study, "longer", collect(by_bound(4000, 110.0))))
    rows = {line for line in page.splitlines() if line.startswith("| `")}
    assert any(
        r.startswith("| `dynamic` | 2,000 | 131.1 M | 100.0 ± ") and "| +30.0 % ± " in r
        for r in rows
    )
    assert any(
        r.startswith("| `dynamic` | 4,000 | 262.1 M | 100.0 ± ") and "| +10.0 % ± " in r
        for r in rows
    )
    assert any(r.startswith("| `dynamic` | 4,000 | 262.1 M | judge | +10.0 % ± ") for r in rows)
    assert verdicts(page)[SHRINKS] == "not measured", "the zero-shot sets were not"
    assert "validation +30.0 % to +10.0 % (" in page
    assert "over all 2 trainings" not in page, "they are no trainings of the same recipe"
    assert SHRINKS not in page_of(whole())
    alone = [r for r in by_bound(2000, 130.0) if r.model != RUNS["MDLM"]]
    page = page_of_study(with_otherwise(collect(whole()), "alone", collect(alone)))
    assert "| `dynamic` |" not in page, "there is nothing to set it against"


def test_other_recipes_lie_in_a_folder_of_their_own(tmp_path: Path) -> None:
    append_records(tmp_path / "r.jsonl", whole())
    other = tmp_path / "otherwise/bound"
    other.mkdir(parents=True)
    append_records(other / "r.jsonl", by_bound(2000, 130.0))
    study = read_study(tmp_path)
    assert list(study.otherwise) == ["bound"] and len(study.last) == len(collect(whole()).last)
    with pytest.raises(UserError, match="bound, perplexity of"):
        with_otherwise(study, "bound", collect([replace(r, data_sha256="other") for r in
                                                by_bound(2000, 130.0)]))  # fmt: skip


def test_another_adaptation_stands_beside_the_first() -> None:
    """Of another masked model: what the first says is left as it is."""
    first, more = collect(whole()), []
    for one in (r for r in whole() if r.step in (300, 2000) and r.metric in ("gen_ppl", "entropy")):
        if one.model == RUNS["MDLM"] or "adapt" in one.model:
            better = 0.5 if "adapt-x" in one.model and one.metric == "gen_ppl" else 1.0
            seeded = {**one.config, "train": {**one.config["train"], "seed": 2}}
            place = one.model.replace("repro/", "repro/seed-2/")
            more.append(replace(one, model=place, config=seeded, value=(one.value or 0) * better))
    page = page_of_study(with_readapted(first, collect(more)))
    claim = "8 sampling steps: continued as XDLM k=0.1 writes better than continued as MDLM"
    found = verdicts(page)
    assert found[claim] == found[f"Adapted again: {claim}"] == "holds"
    assert "400.0" in page and "| continued as XDLM k=0.1 | **200.0" in page
    # Among the numbers of steps, which the script asks for.
    command = "--seed 2 --early-steps 8 32 128 1024 --runs mdlm adapt-mdlm adapt-xdlm --steps 8 32 128 1024"
    assert command in page
    assert "--out results/repro/adapted" in page and page.count("tab:llada_performance</code>") == 1
    assert "Adapted again" not in page_of(whole())


def test_adaptation_is_judged_in_as_many_steps_as_the_paper_takes() -> None:
    """Better in 8 steps, worse in 32."""
    more = []
    for method, value in (("MDLM", 300.0), ("XDLM k=0.1", 400.0)):
        start = {
            "model": f"runs/repro/adapt-{method[0].lower()}dlm",
            "config": config(method, start=RUNS["MDLM"]),
        }
        more += gen(method, value, 32, step=300, **start)
    page = page_of([*whole(), *more])
    found, better = verdicts(page), "continued as XDLM k=0.1 writes better than continued as MDLM"
    assert found[f"8 sampling steps: {better}"] == "holds"
    assert found[f"32 sampling steps: {better}"] == "does not hold"
    assert f"| 32 sampling steps: {better} | ahead in 4 of 5 tasks, as MBPP 15.0 > 4.4 |" in page
    assert f"| 8 sampling steps: {better} |  |" in page
