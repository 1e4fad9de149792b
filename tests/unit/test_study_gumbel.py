"""Texts drawn exactly and by float32 noise: what stands beside what, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from studies import config, gen, page_of_study, verdicts, whole

from xdlm import UserError
from xdlm.cli.main import main
from xdlm.evaluation.records import EvalRecord, append_records
from xdlm.report.study import read_study
from xdlm.report.study.collection import collect, drawn_by_way, with_drawn

MASKED, MIXED = "MDLM", "XDLM k=0.1"
MOST = "Drawn by float32 noise: 1,024 sampling steps: MDLM writes better than XDLM k=0.1"
FALL = (
    "Drawn by float32 noise: from 8 to 1,024 steps the entropy of MDLM's texts falls by more than that of "
    "exact draws"
)


def texts(sampler: str, levels: dict[tuple[str, int], tuple[float, float]]) -> list[EvalRecord]:
    """Perplexity and entropy by method and number of steps, of models of seed 2."""
    found = []
    for (method, steps), (level, entropy) in levels.items():
        about = {"config": config(method, seed=2), "model": f"runs/repro/seed-2/{method}"}
        for one in gen(method, level, steps, sampler=sampler, **about):
            found.append(replace(one, value=entropy) if one.metric == "entropy" else one)
    return found


EXACT = texts("thinned", {
    (MASKED, 8): (700.0, 4.94), (MASKED, 1024): (350.0, 4.87),
    (MIXED, 8): (550.0, 4.88), (MIXED, 1024): (340.0, 4.86),
})  # fmt: skip
GUMBEL = texts("gumbel", {
    (MASKED, 8): (690.0, 4.93), (MASKED, 1024): (150.0, 4.40),
    (MIXED, 8): (540.0, 4.88), (MIXED, 1024): (220.0, 4.60),
})  # fmt: skip


def test_both_ways_stand_beside_each_other() -> None:
    page = page_of_study(with_drawn(collect(whole()), drawn_by_way([*EXACT, *GUMBEL])))
    found = verdicts(page)
    assert found[MOST] == "holds" and found[FALL] == "holds"
    assert (
        found["Drawn by float32 noise: 8 sampling steps: XDLM k=0.1 writes better than MDLM"]
        == "holds"
    )
    assert "of training seed 2 at step 2,000" in page
    # The first judge sees the levels as they are: exp of the difference of logarithms.
    assert "| MDLM, float32 noise against exact | -1.4 % ± 2.8 | -57.1 % ± 1.2 |" in page
    assert "| XDLM k=0.1 against MDLM, exact draws | -21.4 % ± 2.2 | -2.9 % ± 2.7 |" in page
    assert "| XDLM k=0.1 against MDLM, float32 noise | -21.7 % ± 2.2 | +46.7 % ± 4.1 |" in page
    assert "| XDLM k=0.1 against MDLM, the paper | -57.6 % | +26.6 % |" in page
    assert "| MDLM, float32 noise | 4.930 ± 0.010 | 4.400 ± 0.010 |" in page
    assert (
        "--seed 2 --last-only --runs MDLM XDLM k=0.1 --steps 8 1024 --n 64 64 --impl gumbel" in page
    )


def test_the_law_of_that_noise_stands_beside_it() -> None:
    law = [replace(r, sampler="starved", value=r.value and 1.01 * r.value) for r in GUMBEL]
    page = page_of_study(with_drawn(collect(whole()), drawn_by_way([*EXACT, *GUMBEL, *law])))
    found = verdicts(page)
    for claim in (MOST, FALL):
        assert (
            found[claim] == found[claim.replace("by float32", "by the law of float32")] == "holds"
        )
    assert "| MDLM, the law of float32 noise | 4.979 ± 0.010 | 4.444 ± 0.010 |" in page
    assert "--n 64 64 --impl gumbel" in page and "--n 64 64 --impl starved" in page
    alone = page_of_study(with_drawn(collect(whole()), drawn_by_way([*EXACT, *law])))
    assert FALL not in verdicts(alone)


def test_exact_texts_of_that_training_count_with_the_others() -> None:
    study = collect(whole())
    found = [
        page_of_study(one) for one in (study, replace(study, drawn=drawn_by_way([*EXACT, *GUMBEL])))
    ]
    assert "again 350.0 and 340.0, over all 2 trainings" not in found[0]
    assert "again 350.0 and 340.0, over all 2 trainings" in found[1]
    assert "Over several trainings the mean allows for" in found[1]


def test_a_fall_that_exact_draws_share_is_none_of_the_noise() -> None:
    same = [replace(r, sampler="gumbel") for r in EXACT]
    found = verdicts(page_of_study(replace(collect(whole()), drawn=drawn_by_way([*EXACT, *same]))))
    assert found[FALL] == found[MOST] == "not separated by the noise"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"step": 2500}, "MDLM, drawn in several ways.*step"),
        ({"model": "runs/another"}, "MDLM, drawn in several ways.*model"),
        ({"temperature": 0.7}, "MDLM, drawn in several ways.*temperature"),
        ({"judge_sha256": "another"}, "drawn in several ways, judge.*judge_sha256"),
        ({"steps": 512}, "texts of MDLM in 512 steps under .* and no exact ones"),
    ],
)
def test_other_models_or_texts_are_refused(other: dict[str, Any], said: str) -> None:
    masked = [r for r in GUMBEL if r.model.endswith(MASKED) and r.judge is not None]
    kept = masked[:1] if "steps" in other else masked  # several would be one
    with pytest.raises(UserError, match=said):
        drawn_by_way([*EXACT, *(replace(r, **other) for r in kept)])


def test_exact_texts_that_were_drawn_otherwise_than_the_first_are_refused() -> None:
    cold = [replace(r, temperature=0.7) for r in (*EXACT, *GUMBEL)]
    with pytest.raises(UserError, match=r"trained again.*temperature"):
        with_drawn(collect(whole()), drawn_by_way(cold))


def test_a_folder_within_the_results(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    (folder / "gumbel").mkdir(parents=True)
    append_records(folder / "a.jsonl", whole())
    append_records(folder / "gumbel" / "exact.jsonl", EXACT)
    with pytest.raises(UserError, match="'gumbel' must hold texts of such noise"):
        read_study(folder)
    append_records(folder / "gumbel" / "gumbel.jsonl", GUMBEL)
    study = read_study(folder)
    assert study.drawn is not None and len(study.records) == len(whole())
    main(["report", "--results", str(folder), "--out", str(tmp_path / "RESULTS.md")])
    assert "(results/figures/gumbel.png)" in (tmp_path / "RESULTS.md").read_text()
    assert (folder / "figures" / "gumbel.png").stat().st_size < 100_000
