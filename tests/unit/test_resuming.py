"""How a run stops and goes on: signals, kills, changed settings, first weights, and what is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import small_run, trainer_for

from xdlm import UserError, load
from xdlm.config import ProcessConfig, dump_config
from xdlm.training.checkpoint import MODEL, OPTIMIZER, RAW, latest_checkpoint, open_checkpoint
from xdlm.training.parallel import join_world, launcher, note_launch, started_again
from xdlm.training.resuming import find_resume
from xdlm.training.runlog import read_log


def start(config_file: Path, *flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "xdlm.cli.main", "train", str(config_file), *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(condition, process: subprocess.Popen, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_may_be_spent_in_pieces_of_time(tmp_path: Path) -> None:
    config = small_run(tmp_path, steps=10_000, save_every=0)
    short = replace(config, train=replace(config.train, minutes=0.5 / 60))
    trainer = trainer_for(short)
    assert trainer.run()  # as asked
    assert 0 < trainer.step < 10_000
    saved = open_checkpoint(latest_checkpoint(tmp_path))
    assert saved.step == trainer.step
    again = trainer_for(replace(config, train=replace(config.train, minutes=0.2 / 60)))
    again.restore(saved)
    assert again.run() and again.step > saved.step
    with pytest.raises(UserError, match=r"train.minutes must be positive"):
        replace(config.train, minutes=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=["kill -9", "ctrl-c", "by a scheduler"],
)
def test_stopped_and_resumed_equals_never_stopped(tmp_path: Path, how: int, code: int) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    steps = 60
    # The log averages over steps and does not fall in with the checkpoints: that must resume too.
    trainer = trainer_for(small_run(straight, steps=steps, save_every=0, log_every=4))
    assert trainer.run()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(small_run(broken, steps=steps, save_every=5, log_every=4)))
    process = start(recipe)
    wait_for(lambda: latest_checkpoint(broken) is not None, process)
    process.send_signal(how)
    process.wait(timeout=60)
    assert process.returncode == code
    stopped_at = open_checkpoint(latest_checkpoint(broken)).step
    assert 0 < stopped_at < steps, "the run was over before it could be stopped"
    words = f"stopped at step {stopped_at}, saved {latest_checkpoint(broken)} go on with --resume"
    assert how == signal.SIGKILL or words in " ".join(process.stderr.read().split())
    refused = start(recipe)
    assert refused.wait(timeout=60) == 2 and "--resume" in refused.stderr.read()
    resumed = start(recipe, "--resume")
    assert resumed.wait(timeout=120) == 0, resumed.stderr.read()
    a, b = (open_checkpoint(latest_checkpoint(run)) for run in (straight, broken))
    for file in (MODEL, RAW, OPTIMIZER):
        ours, theirs = a.tensors(file), b.tensors(file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    logs = [
        [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in read_log(run / "log.jsonl")]
        for run in (straight, broken)
    ]
    assert logs[0] == logs[1] and len(logs[0]) == steps // 4


@pytest.mark.parametrize("sent", [
    [signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM], [signal.SIGINT, signal.SIGINT],
], ids=["by a scheduler", "twice", "ctrl-c, passed on by a launcher"])  # fmt: skip
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, monkeypatch, sent: list[int]) -> None:
    trainer = trainer_for(small_run(tmp_path, save_every=0))
    take_step = trainer.take_step

    def interrupted_step() -> object:
        for number in sent if trainer.step == 3 else ():
            signal.raise_signal(number)
        return take_step()

    monkeypatch.setattr(trainer, "take_step", interrupted_step)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert not trainer.run()
        assert trainer.ended_by == sent[0]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "not given back"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert open_checkpoint(latest_checkpoint(tmp_path)).step == 4


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, monkeypatch) -> None:
    trainer = trainer_for(small_run(tmp_path))

    def interrupted_step() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.1)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trainer, "take_step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()


def test_a_run_started_again_is_known_by_its_launcher(tmp_path: Path, monkeypatch) -> None:
    """Not by the number of the run, which may be the same for all, or be used again."""
    note_launch(tmp_path, [launcher()])
    assert not started_again(tmp_path), "nobody launched it"
    for number in ("none", "job1"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", number)
        assert not started_again(tmp_path)
        note_launch(tmp_path, ["job1 another-node 7", launcher()])
        assert started_again(tmp_path)
        with monkeypatch.context() as later:
            later.setattr(os, "getppid", lambda: 1)
            assert not started_again(tmp_path)


@pytest.mark.parametrize(("variables", "missing"), [
    ({"WORLD_SIZE": "2"}, "RANK"), ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
    ({"WORLD_SIZE": "two", "RANK": "0"}, "'two'"),
])  # fmt: skip
def test_a_world_without_others_is_refused(
    monkeypatch, variables: dict[str, str], missing: str
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{missing}.*torchrun"), join_world():
        pass


def test_changed_settings_cannot_be_resumed(tmp_path: Path) -> None:
    trainer_for(small_run(tmp_path, steps=2)).run()
    other = small_run(tmp_path, steps=4, batch=8)
    with pytest.raises(UserError, match=r"train\.batch was 6 and is now 8"):
        trainer_for(other).restore(find_resume(tmp_path, resume=True))


def test_how_a_run_is_computed_may_change(tmp_path: Path) -> None:
    trainer_for(small_run(tmp_path, steps=2)).run()
    other = small_run(
        tmp_path, steps=4, parallel="fsdp", activation_checkpointing=True, micro_batch=3
    )
    trainer = trainer_for(other)
    trainer.restore(find_resume(tmp_path, resume=True))
    assert trainer.run()


def test_keeps_only_so_many_checkpoints(tmp_path: Path) -> None:
    trainer_for(small_run(tmp_path, steps=5, save_every=1, keep=2)).run()
    assert [p.name for p in sorted(tmp_path.glob("step-*"))] == ["step-00000004", "step-00000005"]
    assert load(tmp_path, device="cpu").step == 5


def test_keeps_checkpoints_at_multiples_for_ever(tmp_path: Path) -> None:
    """Also across a stop: a resumed run drops none that the first one kept."""
    settings = {"save_every": 1, "keep": 1, "keep_every": 3}
    trainer_for(small_run(tmp_path, steps=5, **settings)).run()
    longer = trainer_for(small_run(tmp_path, steps=8, **settings))
    longer.restore(find_resume(tmp_path, resume=True))
    longer.run()
    names = [p.name for p in sorted(tmp_path.glob("step-*"))]
    assert names == ["step-00000003", "step-00000006", "step-00000008"]
    with pytest.raises(UserError, match=r"multiple of train.save_every \(2\), got 3"):
        small_run(tmp_path, save_every=2, keep_every=3)


def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    first = trainer_for(small_run(tmp_path / "first", steps=4))
    first.run()
    config = small_run(tmp_path / "second", steps=2, start=str(tmp_path / "first"))
    config = replace(config, process=ProcessConfig(kind="masked"))
    second = trainer_for(config)
    second.start_from(open_checkpoint(latest_checkpoint(tmp_path / "first")))
    for name, value in second.model.named_parameters():
        assert torch.equal(value, first.ema.average[name])
        assert torch.equal(second.ema.average[name], first.ema.average[name])
    second.run()
    assert load(tmp_path / "second").step == 2


def test_what_a_run_cannot_begin_with_is_named(tmp_path: Path) -> None:
    trainer_for(small_run(tmp_path / "first", steps=1)).run()
    checkpoint = open_checkpoint(latest_checkpoint(tmp_path / "first"))
    config = small_run(tmp_path / "second")
    for name, value in {"width": 64, "heads": 2 * config.model.heads}.items():
        other = replace(config, model=replace(config.model, **{name: value}))
        says = f"does not fit this recipe's model: its {name} is .*, and model.{name} is {value}"
        with pytest.raises(UserError, match=says):
            trainer_for(other).start_from(checkpoint)
    dropping = replace(config, model=replace(config.model, dropout=0.2))
    trainer_for(dropping).start_from(checkpoint)
    with pytest.raises(UserError, match=r"does not fit this recipe's model: embed\.weight"):
        trainer_for(replace(config, process=ProcessConfig(kind="uniform"))).start_from(checkpoint)


def test_a_checkpoint_says_what_it_took(tmp_path: Path) -> None:
    """Over all parts of a run, and no more than passed."""
    began = time.monotonic()
    trainer_for(small_run(tmp_path, steps=4)).run()
    first = open_checkpoint(latest_checkpoint(tmp_path))
    again = trainer_for(small_run(tmp_path, steps=8))
    again.restore(first)
    time.sleep(0.2)  # what passes outside of the run does not count
    again.run()
    second = open_checkpoint(latest_checkpoint(tmp_path))
    assert 0 < first.meta["seconds"] < second.meta["seconds"] < time.monotonic() - began - 0.2
    assert second.meta["device"] == "cpu"
