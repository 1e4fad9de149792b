"""The log of a run and the curves drawn from it: complete, once each step, and only what is known."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from xdlm.cli.main import main
from xdlm.config import DataConfig, OptimConfig, ProcessConfig, RunConfig, TrainConfig, dump_config
from xdlm.models import DiT, DiTConfig
from xdlm.training.curves import TENSORBOARD
from xdlm.training.meter import Meter, peak_flops
from xdlm.training.runlog import read_log

MODEL = DiTConfig(depth=1, width=16, heads=2, cond_width=4, dropout=0.0)


def write_recipe(folder: Path, **train: object) -> Path:
    settings = {
        "out": str(folder / "run"), "steps": 6, "batch": 4, "micro_batch": 4, "device": "cpu",
        "log_every": 1, "eval_every": 0, "save_every": 2,
    }  # fmt: skip
    text = folder / "text.txt"
    text.write_text("It was a dark and stormy night. " * 40)
    config = RunConfig(
        process=ProcessConfig(kind="mixed"), model=MODEL,
        data=DataConfig(train=str(text), val=str(text), length=16), optim=OptimConfig(warmup=2),
        train=TrainConfig(**{**settings, **train}),  # type: ignore[arg-type]
    )  # fmt: skip
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_config(config))
    return recipe


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("length", [8, 24])
def test_operations_per_token_are_those_that_torch_counts(length: int, share: float) -> None:
    """Forward and backward on 2 and on 6 rows: the difference is free of what is done once a batch. The
    head looks at all positions, or at a share of them."""
    config = DiTConfig(depth=2, width=32, heads=2, cond_width=8, mlp_ratio=3)
    model = DiT(config, 50)

    def counted(batch: int) -> int:
        z = torch.randint(0, 50, (batch, length))
        # Plain attention: fused kernels compute the scores again backward, which is not counted.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            states = model.body(z, torch.ones(batch))
            rows = torch.arange(int(share * z.numel()))
            model.head(model.finish(states, rows)).sum().backward()
        return counter.get_total_flops()

    assert counted(6) - counted(2) == 4 * length * model.flops_per_token(length, share)


def test_only_known_gpus_have_a_peak() -> None:
    bf16 = torch.bfloat16
    assert peak_flops("NVIDIA H200", bf16) == peak_flops("NVIDIA H100 80GB HBM3", bf16) == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", bf16) == 756.5e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", bf16) == 312e12
    assert peak_flops("NVIDIA L40S", bf16) == 362e12
    for name in ("NVIDIA GH200 480GB", "NVIDIA A10G", "NVIDIA L40", "NVIDIA H100 MIG 1g.10gb", ""):
        assert peak_flops(name, bf16) is None
    assert peak_flops("NVIDIA H200", torch.float32) is None


def test_utilisation_counts_the_rows_of_the_head(monkeypatch) -> None:
    """Steps of 0.5 s on two processes with a peak of 1 MFLOP/s each."""
    model = DiT(MODEL, 50)
    meter = Meter(model, torch.device("cpu"), torch.bfloat16, batch=4, length=16, processes=2)
    meter._peak = 1e6
    clock = iter((0.0, 1.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    meter.begin(10)
    meter.count(tokens=64, head_rows=16)
    figures = meter.read(12)
    assert figures["tokens_per_s"] == 2 * 4 * 16
    assert figures["mfu"] == pytest.approx(128 * model.flops_per_token(16, 0.25) / 2e6, rel=1e-4)
    assert figures["data_wait"] == 0


def test_a_line_holds_what_it_should(tmp_path: Path) -> None:
    main(["train", str(write_recipe(tmp_path, steps=3, eval_every=3, eval_rows=2))])
    *lines, last, validation = read_log(tmp_path / "run" / "log.jsonl")
    wanted = {"step", "loss", "elbo", "grad_norm", "lr", "tokens_per_s", "data_wait", "peak_gb"}
    for line in (*lines, last):
        assert line.keys() == wanted  # on a CPU the utilisation is left out, not guessed
        assert 0 <= line["data_wait"] <= 1 and 0 < line["peak_gb"] < 1000
    assert validation.keys() == {"step", "val_nats", "val_stderr", "val_ppl"}


def test_tensorboard_curves_go_on_without_duplicates(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    main(["train", str(recipe), "--train.tensorboard", "--train.steps", "5"])
    # As if killed after step 5: the checkpoint of step 4 is the newest.
    shutil.rmtree(run / "step-00000005")
    main(["train", str(recipe), "--train.tensorboard", "--resume"])
    events = event_accumulator.EventAccumulator(str(run / TENSORBOARD))
    events.Reload()
    logged = {record["step"]: record for record in read_log(run / "log.jsonl")}
    assert list(logged) == [1, 2, 3, 4, 5, 6]
    assert set(events.Tags()["scalars"]) == logged[1].keys() - {"step"}
    for name in ("loss", "elbo", "grad_norm", "lr", "tokens_per_s", "data_wait", "peak_gb"):
        drawn = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in drawn] == [1, 2, 3, 4, 5, 6]
        for step, value in drawn:
            assert value == pytest.approx(logged[step][name], rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "package", "says"),
    [
        (["--train.tensorboard"], "torch.utils.tensorboard", "install xdlm[log]"),
        (["--train.wandb", "mine"], "wandb", "install xdlm[wandb]"),
    ],
)
def test_a_missing_package_is_one_line(
    tmp_path: Path, monkeypatch, capsys, flags: list[str], package: str, says: str
) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name == package:
            raise ImportError(f"No module named '{name}'")
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit) as stop:
        main(["train", str(write_recipe(tmp_path)), *flags])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "run").exists()


def test_wandb_works_offline_and_goes_on_as_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    command = [sys.executable, "-m", "xdlm.cli.main", "train", str(recipe), "--train.wandb", "mine"]
    offline = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for flags in (["--train.steps", "2"], ["--resume"]):
        subprocess.run(
            [*command, *flags], env=offline, check=True, stdin=subprocess.DEVNULL, timeout=120
        )
    name = (run / "wandb-id.txt").read_text()
    folders = list((run / "wandb").glob(f"offline-run-*-{name}"))
    assert len(folders) == 2
    assert all(list(folder.glob("*.wandb")) for folder in folders)
    assert [record["step"] for record in read_log(run / "log.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_wandb_without_a_login_says_so_and_asks_nothing(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, "-m", "xdlm.cli.main", "train", str(write_recipe(tmp_path)),
         "--train.wandb", "mine"],
        env={**clean, "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("xdlm: not logged in to Weights & Biases")


def test_log_survives_a_cut_line(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps({"step": 1, "loss": 2.0}) + '\n{"step": 2, "lo')
    assert read_log(file) == [{"step": 1, "loss": 2.0}]
