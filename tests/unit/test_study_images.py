"""The sections about images: the paper's order holds or not by the numbers; no records, no section."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from results import record
from studies import config, page_of, verdicts, whole

from xdlm import UserError
from xdlm.cli.main import main
from xdlm.evaluation.records import EvalRecord, append_records
from xdlm.report.study import compose, paper
from xdlm.report.study.collection import collect
from xdlm.report.study.paper import PaperTable

TABLES: dict[str, dict[float, PaperTable]] = {
    "pixels": {1.0: paper.CIFAR_FID, 2.0: paper.CIFAR_FID_GUIDED},
    "vq:runs/cifar10/codec": {1.0: paper.IMAGENET_FID, 2.0: paper.IMAGENET_FID_GUIDED},
}


def painted(tokenizer: str = "pixels", error: float = 0.1) -> Iterator[EvalRecord]:
    """As in the paper."""
    about = {
        "n": 10_000, "data": "cifar10:train", "data_sha256": "train", "judge": "inception-2015",
        "judge_sha256": "weights", "sampler": "ancestral", "temperature": 1.0, "top_p": 1.0,
        "guidance_schedule": "constant", "length": 3072, "details": {"reference_n": 50_000.0},
    }  # fmt: skip
    for scale, table in TABLES[tokenizer].items():
        for method in table.rows:
            kind = method.lower().replace(" k=", "-k")
            tree = config(method)
            own = {
                "model": f"runs/cifar10/{'' if tokenizer == 'pixels' else 'codes-'}{kind}", "step": 10_000,
                "config": {**tree, "data": {**tree["data"], "tokenizer": tokenizer}}, **about,
            }  # fmt: skip
            for steps in table.columns[:2] if tokenizer == "pixels" else table.columns[:3]:
                place = {"steps": int(steps), "guidance": scale, **own}
                value = table.value(method, steps)
                yield record(metric="fid", value=value, stderr=error, **place)
                yield record(metric="kid", value=value / 1000, stderr=error / 1000, **place)
                for metric in ("precision", "recall"):
                    yield record(metric=metric, value=0.5, stderr=None, **place)


def real() -> list[EvalRecord]:
    about = {"config": {}, "data": "cifar10:train", "data_sha256": "train", "n": 10_000,
             "judge": "inception-2015", "judge_sha256": "weights"}  # fmt: skip
    return [record(metric="real_fid", value=3.151, stderr=0.02, model="cifar10:test", **about)]


def test_no_records_no_section() -> None:
    assert "Images" not in page_of(whole())


def test_what_follows_the_paper_holds() -> None:
    page = page_of([*whole(), *painted(), *painted("vq:runs/cifar10/codec"), *real()])
    found = {claim: verdict for claim, verdict in verdicts(page).items() if claim.startswith("FID")}
    assert len(found) == 9 and set(found.values()) == {"holds"}, found
    assert "FID of pixels, 32 steps without guidance: UDLM < XDLM k=0.1 < MDLM" in found
    assert "10,000 images each against the 50,000 of cifar10:train, after 10,000 training" in page
    assert "cifar10:test: FID 3.151 ± 0.020. There is no Inception Score" in page
    assert "| UDLM | **41.03 ± 0.10** | **27.82 ± 0.10** |" in page
    assert (
        "128 steps: from best to worst, here as in the paper: UDLM, XDLM k=0.5, XDLM k=0.1" in page
    )
    assert (
        "python recipes/cifar10/run.py --minutes 60 --runs mdlm gidd xdlm-k0.001 xdlm-k0.1 xdlm-k0.5 udlm "
        "--train-steps 1000000 --steps 32 128 --guidance 1 2 --n 10000 --precision float32\n"
    ) in page
    assert (
        "--code-train-steps 1000000 --code-steps 4 8 16 --code-guidance 1 2 --n 10000 --prec"
        in page
    )
    assert "compare orders, not values" in page
    assert "xdlm eval image --model runs/cifar10/udlm --data cifar10:train --steps 32 128" in page
    assert "| MDLM | 0.500 | 0.500 |" in page and "tab:cifar10_performance_cfg1.0" in page
    assert "nan" not in page and "None" not in page


def test_a_study_of_a_cpus_size_says_so() -> None:
    small = [
        replace(r, n=2500, model=r.model.replace("cifar10/", "cifar10-small/"))
        for r in painted("vq:runs/cifar10/codec")
    ]
    page = page_of([*small, *real()])
    assert "2,500 images each" in page and "FID 3.151 ± 0.020 (10,000 of them)." in page
    assert "python recipes/cifar10/run.py --minutes 120 --lanes 2 --small --runs codes-mdlm" in page
    assert "--limit" not in page


def test_images_that_were_compared_with_some_of_a_data_set_say_so() -> None:
    some = {"reference_n": 10_000.0, "reference_limit": 10_000.0}
    page = page_of([replace(r, details=some) for r in painted()])
    assert "images each against the first 10,000 of cifar10:train" in page
    assert "--guidance 1 2 --n 10000 --limit 10000 --precision float32" in page
    assert "--data cifar10:train --limit 10000 --steps" in page


def test_what_images_took_stands_with_them() -> None:
    own = list(painted("vq:runs/cifar10/codec"))
    took = replace(own[0], metric="train_seconds", value=77.0, guidance=None, steps=None)
    study = replace(collect([*whole(), *own, took]), seconds={
        "codec": 1.0, "real.measure": 2.0, "codes-xdlm-k0.1": 4.0, "codes-xdlm-k0.1.measure": 120.0,
        "mdlm.ppl": 60.0,
    })  # fmt: skip
    text, images = compose(study, "results/repro", "RESULTS.md")[0].split("## Images: codes")
    assert "and commands 60 s (1.0 min) of measuring" in text
    assert took.model == "runs/cifar10/codes-mdlm" and "codes-mdlm" not in text
    assert "| codes-mdlm | MDLM |" in images and (
        "took 77 s (1.3 min) of training, and commands 120 s (2.0 min) of measuring" in images
    )


def test_images_alone_make_a_page() -> None:
    page = page_of(list(painted()))
    assert (
        verdicts(page)["FID of pixels, 128 steps under guidance 2: UDLM < XDLM k=0.1 < MDLM"]
        == "holds"
    )
    assert "Images: codes" not in page and "perplexity" not in page and "repro/run.py" not in page


def test_what_differs_does_not_hold_and_what_noise_hides_is_said() -> None:
    swapped = [
        replace(r, value=500.0) if r.metric == "fid" and r.model.endswith("udlm") else r
        for r in painted()
    ]
    claim = "FID of pixels, 32 steps without guidance: UDLM < XDLM k=0.1 < MDLM"
    assert verdicts(page_of(swapped))[claim] == "does not hold"
    assert verdicts(page_of(list(painted(error=100.0))))[claim] == "not separated by the noise"
    fewer = [r for r in painted() if not r.model.endswith("mdlm")]
    assert verdicts(page_of(fewer))[claim] == "not measured"
    assert "Not measured (FID without guidance): MDLM." in page_of(fewer)


def test_what_does_not_compare_is_refused() -> None:
    records = list(painted())
    with pytest.raises(UserError, match="images: records differ in n "):
        page_of([replace(records[0], n=5_000), *records[1:]])
    other = [replace(r, model="runs/other") for r in records if r.model.endswith("mdlm")]
    with pytest.raises(UserError, match="two models of images of MDLM"):
        page_of([*records, *other])


def test_pictures_stand_in_their_sections(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "repro"
    (folder / "images").mkdir(parents=True)
    append_records(folder / "images" / "mdlm.jsonl", list(painted()))
    names = [
        f"pixels-{steps}-steps-guidance-2{what}" for steps in (128, 32) for what in ("-strip", "")
    ]
    for name in (*names, "other", "codes-8-steps-guidance-2"):
        (folder / "images" / f"{name}.png").write_bytes(b"")
    main(["report", "--results", str(folder), "--out", str(tmp_path / "RESULTS.md")])
    page = (tmp_path / "RESULTS.md").read_text().partition("## Images")[2]
    places = [page.index(f"(results/repro/images/{name}.png)") for name in names]
    assert sorted(places) == [
        places[i] for i in (3, 2, 1, 0)
    ]  # few steps first, grids before strips
    assert "Samples of 32 steps under guidance 2, a class in each column" in page
    assert "How the first of them came about (128 steps, guidance 2)" in page
    assert "other" not in page and "codes-8" not in page


def test_a_table_of_any_images(tmp_path: Path, capsys) -> None:
    file = tmp_path / "images.jsonl"
    append_records(file, [*list(painted())[:8], *real()])
    main(["report", "--records", str(file), "--out", str(tmp_path / "report")])
    out = capsys.readouterr().out
    assert "## Images, against cifar10:train" in out
    assert "| MDLM | 1 | 32 | 211.983 ± 0.100 | 0.21198 ± 0.00010 | 0.500 | 0.500 |" in out
    assert "| cifar10:test |  |  | 3.151 ± 0.020 |" in out
