"""Checkpoint folders: whole or refused; writing: all or nothing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_training import small_run, trainer_for

from xdlm import UserError, load
from xdlm.config import dump_config
from xdlm.files import atomic_folder, write_atomic
from xdlm.training.checkpoint import latest_checkpoint, open_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    trainer = trainer_for(small_run(tmp_path / "run", steps=1))
    assert trainer.run()
    return tmp_path / "run" / "step-00000001"


def test_round_trip(checkpoint: Path) -> None:
    model = load(checkpoint, device="cpu")
    raw = load(checkpoint, device="cpu", weights="raw")
    assert (model.weights, raw.weights, model.step) == ("ema", "raw", 1)
    name = "out.bias"
    weights = [dict(m.denoiser.named_parameters())[name] for m in (model, raw)]
    assert not torch.equal(*weights)
    same = [load(folder, device="cpu").sample(1, steps=2, length=8).tokens
            for folder in (checkpoint, checkpoint.parent)]  # fmt: skip
    assert torch.equal(*same)


def test_export_keeps_what_matters(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, device="cpu")
    model.save(tmp_path / "small", dtype=torch.bfloat16)
    again = load(tmp_path / "small", device="cpu")
    for ours, theirs in zip(model.denoiser.parameters(), again.denoiser.parameters(), strict=True):
        assert torch.equal(ours.to(torch.bfloat16), theirs.to(torch.bfloat16))
    with pytest.raises(UserError, match=r"no raw\.safetensors"):
        load(tmp_path / "small", device="cpu", weights="raw")


@pytest.mark.parametrize("name", [
    "model.safetensors", "raw.safetensors", "optimizer.safetensors", "config.yaml",
    "tokenizer.json", "checkpoint.json",
])  # fmt: skip
def test_missing_or_damaged_files_are_named(checkpoint: Path, name: str) -> None:
    file = checkpoint / name
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(UserError, match=r"is missing|has no checkpoint\.json"):
        load(checkpoint)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"truncated|damaged"):
        load(checkpoint)
    if name != "checkpoint.json":
        flipped = bytearray(content)
        flipped[len(flipped) // 2] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(UserError, match="damaged"):
            load(checkpoint)


def test_files_that_do_not_fit_each_other(checkpoint: Path, tmp_path: Path) -> None:
    """A model of another shape, with a manifest that vouches for it: the shapes still disagree."""
    other = small_run(tmp_path / "other", steps=1)
    object.__setattr__(other.model, "width", 64)
    assert trainer_for(other).run()
    donor = tmp_path / "other" / "step-00000001"
    meta = json.loads((checkpoint / "checkpoint.json").read_text())
    donor_meta = json.loads((donor / "checkpoint.json").read_text())
    (checkpoint / "model.safetensors").write_bytes((donor / "model.safetensors").read_bytes())
    meta["files"]["model.safetensors"] = donor_meta["files"]["model.safetensors"]
    (checkpoint / "checkpoint.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=r"does not fit its config\.yaml"):
        load(checkpoint)


def test_unknown_format_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        load(checkpoint)


def _small_files_only() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """The operating system refuses the write half-way, as it does when a disk is full."""
    run = tmp_path / "run"
    assert trainer_for(small_run(run, steps=3)).run()
    before = latest_checkpoint(run)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(small_run(run, steps=9)))
    done = subprocess.run(
        [sys.executable, "-m", "xdlm.cli.main", "train", str(recipe), "--resume"],
        preexec_fn=_small_files_only, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("xdlm: cannot write") and "Traceback" not in done.stderr
    assert latest_checkpoint(run) == before
    assert open_checkpoint(before).step == 3
    assert sorted(p.name for p in run.iterdir()) == ["log.jsonl", before.name]


def test_unwritable_folder_fails_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write"):
        trainer_for(small_run(tmp_path / "file" / "run")).run()


def test_atomic_folder_disappears_on_failure(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with pytest.raises(ZeroDivisionError), atomic_folder(target) as scratch:
        (scratch / "half").write_text("written")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_atomic_folder_replaces_whole(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    for content in ("old", "new"):
        with atomic_folder(target) as scratch:
            (scratch / content).write_text(content)
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_write_atomic_keeps_the_old_content_on_failure(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomic(target, "old")
    with pytest.raises(UserError):
        write_atomic(target / "below", "new")
    assert target.read_text() == "old"
