"""Methods that were trained again: what stands beside the first training, and what both say together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from studies import (
    VALIDATION,
    config,
    page_of,
    page_of_study,
    ppl,
    real,
    repeated,
    trained_twice,
    verdicts,
    whole,
)

from xdlm import UserError
from xdlm.cli.main import main
from xdlm.evaluation.records import append_records
from xdlm.report.study import read_study
from xdlm.report.study.beside import add_seconds
from xdlm.report.study.collection import collect, with_again
from xdlm.report.study.commands import repeat_again
from xdlm.report.study.pooling import is_same_judge, judges_again, many_together, repeatedly
from xdlm.report.study.verdict import Estimate, Outcome, across, pooled

MANY = (
    "256, 512 and 1,024 sampling steps together, drawn exactly: MDLM writes better than XDLM k=0.1"
)
MOST = "1,024 sampling steps, drawn exactly: MDLM writes better than XDLM k=0.1"
LESS = (
    "1,024 sampling steps, drawn exactly: MDLM's lead over XDLM k=0.1 is smaller than the paper's"
)


def test_means_under_inverse_variances() -> None:
    """Weights 4 and 1; over many draws the error is the scatter, and smaller than that of equal weights."""
    assert pooled([Estimate(1.0, 0.5), Estimate(6.0, 1.0)])[:2] == pytest.approx(
        (2.0, 1 / math.sqrt(5))
    )
    assert pooled([Estimate(3.0, 0.2)])[:2] == pytest.approx((3.0, 0.2))
    for unknown in (math.nan, 0.0):
        assert math.isnan(pooled([Estimate(1.0, 1.0), Estimate(2.0, unknown)]).stderr)
    errors = (0.5, 1.0, 2.0)
    draws = np.random.default_rng(0).normal(0.0, errors, (20_000, 3))
    means = [pooled([Estimate(*e) for e in zip(row, errors, strict=True)]) for row in draws]
    scatter = np.std([mean.value for mean in means])
    assert (
        scatter == pytest.approx(means[0].stderr, rel=0.02) and scatter < draws.mean(1).std() / 1.5
    )


def cells(masked: float, mixed: float, relative: float, steps: int = 1024) -> dict:
    return {
        name: {steps: Estimate(value, value * relative)}
        for name, value in (("MDLM", masked), ("XDLM k=0.1", mixed))
    }


def test_trainings_differ_by_more_than_their_texts() -> None:
    """Two that lie 10 of their errors apart say no more than two numbers do: a mean, and their scatter."""
    near, far = Estimate(0.0, 0.01), Estimate(0.1, 0.01)
    mean = across([near, far])
    assert mean.value == pytest.approx(0.05) and mean.stderr == pytest.approx(0.05)
    assert across([near, Estimate(0.01, 0.01)]) == pooled([near, Estimate(0.01, 0.01)])
    assert across([far]) == pooled([far])
    lopsided = across([Estimate(0.0, 0.001), Estimate(0.1, 0.02), Estimate(0.1, 0.02)])
    assert 0.03 < lopsided.value < 0.07, "not the best known alone"
    assert math.isnan(across([near, Estimate(0.1, math.nan)]).stderr)


def test_two_trainings_decide_together() -> None:
    """Each hides the answer in its noise, 1.8 errors of 3 % √2 being log 1.08; both do not. Judges
    may have other scales."""
    one, other = cells(100.0, 108.0, 0.03), cells(900.0, 972.0, 0.03)
    alone = [repeatedly(cell, [], 1024) for cell in (one, other)]
    assert [test.outcome for test in alone] == [Outcome.NOISE] * 2
    both = repeatedly(one, [other], 1024)
    assert both.outcome == Outcome.HOLDS
    assert (
        both.brief
        == "100.0 and 108.0, again 900.0 and 972.0, over all 2 trainings +8.0 % ± 3.2 (2.6 se)"
    )
    worse = repeatedly(cells(108.0, 100.0, 0.03), [cells(972.0, 900.0, 0.03)], 1024)
    assert worse.outcome == Outcome.FAILS
    assert repeatedly(one, [cells(900.0, 972.0, 0.03, steps=8)], 1024) == alone[0]
    assert repeatedly({}, [other], 1024).outcome == Outcome.UNKNOWN
    thrice = repeatedly(one, [other, cells(50.0, 54.0, 0.03)], 1024)
    assert thrice.brief == (
        "100.0 and 108.0, again 900.0 and 972.0, then 50.00 and 54.00, over all 3 trainings +8.0 % ± 2.6 "
        "(3.1 se)"
    )
    more = many_together({"j": one}, {"j": [cells(900.0, 972.0, 0.03, steps=256)]})
    assert more.outcome == Outcome.HOLDS and "over 256 and 1,024 steps" in more.here
    assert many_together({"j": one}, {"other": [other]}).outcome == Outcome.NOISE
    few = many_together({"j": cells(1.0, 2.0, 0.01, steps=128)}, {})
    assert few.outcome == Outcome.UNKNOWN, "128 are not many"


def test_the_page_sets_both_trainings_side_by_side() -> None:
    page = page_of_study(trained_twice(share=1.02, quality=1.03))
    found = verdicts(page)
    own = {claim for claim in found if claim.startswith("Trained again: ")}
    assert len(own) == 5 and set(found.values()) == {"holds"}, found
    assert "| MDLM | 23.32 ± 0.10 | 23.79 ± 0.10 | +2.0 % ± 0.6 |" in page
    assert (
        "Another training changes perplexity of text by +2.0 % to +2.0 %; that of generated text under"
        in page
    )
    assert page.count("| difference | +3.0 % ± ") == 2, (
        "of the judge that stayed the same, for two methods"
    )
    assert (
        "Perplexity under judge, trained again too: its values compare within a training alone"
        in page
    )
    assert "| texts, again | 1,024 | 1,024 | 1,024 |" in page
    assert "| again | -57.6 % ± 0.2 | +14.7 % ± 0.6 | +26.6 % ± 0.7 |" in page
    assert (
        "trained as before but for the seed" in page
        and "(see [Trained again](#trained-again))" in page
    )
    assert "models took 380 s (6.3 min) of training" in page
    assert "models took 1,284 s (21.4 min) of training" in page, (
        "the first training stands for itself"
    )
    assert "nan" not in page


def test_without_a_second_training_nothing_is_said_of_it() -> None:
    page = page_of(whole())
    assert "rained again" not in page and MANY in verdicts(page) and MOST in verdicts(page)


def test_trainings_that_contradict_each_other_decide_nothing() -> None:
    """However well the texts of the other are known: they say the opposite, of other models."""
    study = trained_twice()
    assert study.again is not None
    swapped = {"MDLM": "XDLM k=0.1", "XDLM k=0.1": "MDLM"}
    other = [
        replace(r, model=f"runs/repro/seed-1/{swapped[m]}", config=config(swapped[m], seed=1))
        for m in swapped for r in repeated(m)
    ]  # fmt: skip
    found = verdicts(page_of_study(with_again(replace(study, again=None), collect(other))))
    assert found[MANY] == found[MOST] == "not separated by the noise"
    assert found[LESS] == "not separated by the noise" and LESS not in verdicts(page_of(whole()))
    assert found[f"Trained again: {MANY}"] == found[f"Trained again: {MOST}"] == "does not hold"
    assert found["Validation perplexity: MDLM ≤ XDLM k=0.1 < UDLM"] == "holds", "of the first alone"
    assert found["Trained again: Validation perplexity: MDLM ≤ XDLM k=0.1"] == "does not hold"


def test_the_same_rows_are_compared_with_each_other() -> None:
    """A change of 1 % in every row is sure, however much rows differ; not so in another order."""
    rows = np.random.default_rng(0).normal(800.0, 200.0, 64)
    about = {"details": {"tokens": 64 * 256}, "n": 64, "stderr": 2.0}

    def one(trained: int, factor: float, **more: object) -> list:
        nats = list(rows + 256 * math.log(factor))
        return [
            ppl(method, value * factor, config=config(method, seed=trained), row_nats=nats,
                **{**about, **more})
            for method, value in (("MDLM", 23.0), ("XDLM k=0.1", 25.0))
        ]  # fmt: skip

    first = collect(one(0, 1.0))
    page = page_of_study(with_again(first, collect(one(1, 1.01))))
    assert "| MDLM | 23.00 ± 2.00 | 23.23 ± 2.00 | +1.0 % ± 0.0 |" in page
    assert "Rows of text are the same, in the same order" in page
    page = page_of_study(with_again(first, collect(one(1, 1.01, seed=1))))
    assert "| MDLM | 23.00 ± 2.00 | 23.23 ± 2.00 | +1.0 % ± 12.4 |" in page


def test_judges_are_the_same_by_their_files_or_by_real_text() -> None:
    study = trained_twice()
    small = "SmolLM2-135M-Instruct-Q8_0.gguf"
    assert study.again is not None
    assert is_same_judge(study, small, study.again, small)
    assert not is_same_judge(study, "judge", study.again, "judge")
    assert judges_again(study, study.again) == {"judge": "judge", small: small}
    other = [
        replace(r, judge="folder", judge_sha256="f") if r.judge == small else r
        for r in (*study.again.records, *real())
    ]  # fmt: skip
    assert judges_again(study, collect(other))[small] == "folder", "it says the same of real text"
    unlike = [replace(r, value=28.0) if r.metric == "real_ppl" else r for r in other]
    assert small not in judges_again(study, collect(unlike))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"data_sha256": "x"}, "data_sha256"),
        ({"draws": 8}, "draws"),
    ],
)
def test_what_was_measured_otherwise_is_refused(change: dict, reason: str) -> None:
    again = [
        replace(r, **change) for r in repeated("MDLM") if r.metric == "ppl" and r.data == VALIDATION
    ]
    with pytest.raises(UserError, match=f"trained again.*{reason}"):
        with_again(collect(whole()), collect(again))


def test_other_settings_are_said() -> None:
    other = [replace(r, config=config("MDLM", seed=1, batch=64)) for r in repeated("MDLM")]
    page = page_of_study(with_again(collect(whole()), collect(other)))
    assert "Their configurations differ in more: train.batch." in page
    assert "XDLM k=0.1 not measured" in page and "nan" not in page


def test_the_command_is_that_of_the_records() -> None:
    study = trained_twice()
    assert study.again is not None
    judge = ppl("MDLM", 15.0, model="runs/repro/seed-1/judge",
                config={**config("MDLM", seed=1), "process": {"kind": "autoregressive"}})  # fmt: skip
    assert repeat_again(collect([*study.again.records, judge])) == (
        "python recipes/repro/run.py --minutes 60 --judge models/SmolLM2-135M-Instruct-Q8_0.gguf "
        "--precision float32 --seed 1 "
        "--last-only --runs mdlm xdlm-k0.1 judge --steps 8 256 1024 --n 1024 1024 1024"
    )


def test_a_folder_within_the_results(tmp_path: Path) -> None:
    """Its records and seconds are its own; page and figures are the same bytes each time."""
    folder = tmp_path / "results"
    (folder / "again").mkdir(parents=True)
    append_records(folder / "a.jsonl", whole())
    for method in ("MDLM", "XDLM k=0.1"):
        append_records(folder / "again" / f"{method}.jsonl", repeated(method))
    add_seconds(folder / "seconds.csv", "mdlm.last", 40)
    add_seconds(folder / "again" / "seconds.csv", "mdlm.last", 70)
    study = read_study(folder)
    assert study.again is not None and len(study.records) == len(whole())
    assert (study.seconds, study.again.seconds) == ({"mdlm.last": 40}, {"mdlm.last": 70})
    written = []
    for _ in range(2):
        main(["report", "--results", str(folder), "--out", str(tmp_path / "RESULTS.md")])
        figure = folder / "figures" / "again.png"
        written.append(((tmp_path / "RESULTS.md").read_bytes(), figure.read_bytes()))
    assert written[0] == written[1] and b"(results/figures/again.png)" in written[0][0]
    assert len(written[0][1]) < 100_000
