"""The first twenty losses of each method, against a file.

They change whenever noise, times, the order of the data, the loss's weighting, the initial weights or the
optimiser do: if that is meant, write them anew with

    pytest tests/golden --update-golden

and say so in the commit. Another CPU adds up in another order, so they are compared to one part in ten
thousand; what must be noticed changes them by far more.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xdlm.api import load_tokenizer
from xdlm.cli.train import make_trainer
from xdlm.config import DataConfig, OptimConfig, ProcessConfig, RunConfig, TrainConfig
from xdlm.models import PRESETS
from xdlm.training.runlog import read_log

CURVES = Path(__file__).with_name("curves.json")
METHODS = {
    "mdlm": ProcessConfig(kind="masked"),
    "gidd": ProcessConfig(kind="gidd"),
    "udlm": ProcessConfig(kind="uniform"),
    "xdlm": ProcessConfig(kind="mixed", k=0.1),
}
FIELDS = ("loss", "grad_norm")


def curve(method: str, out: Path, seed: int = 1) -> dict[str, list[float]]:
    config = RunConfig(
        process=METHODS[method],
        model=PRESETS["nano"],
        data=DataConfig(length=64, limit=4),
        optim=OptimConfig(lr=2e-3, warmup=5, weight_decay=0.01),
        train=TrainConfig(
            out=str(out), steps=20, batch=8, micro_batch=4, seed=seed, device="cpu", log_every=1,
            eval_every=0, save_every=0,
        ),
    )  # fmt: skip
    assert make_trainer(config, load_tokenizer(config.data.tokenizer)).run()
    records = read_log(out / "log.jsonl")
    return {field: [float(f"{record[field]:.7g}") for record in records] for field in FIELDS}


@pytest.mark.parametrize("method", METHODS)
def test_first_losses(method: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = curve(method, tmp_path)
    known = json.loads(CURVES.read_text(encoding="utf-8")) if CURVES.exists() else {}
    if request.config.getoption("--update-golden"):
        known[method] = found
        CURVES.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    for field in FIELDS:
        assert len(found[field]) == 20
        assert found[field] == pytest.approx(known[method][field], rel=1e-4), field


def test_another_seed_is_noticed(tmp_path: Path) -> None:
    known = json.loads(CURVES.read_text(encoding="utf-8"))["xdlm"]["loss"]
    assert curve("xdlm", tmp_path, seed=2)["loss"] != pytest.approx(known, rel=1e-2)
