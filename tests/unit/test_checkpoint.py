"""Checkpoint folders: whole or refused; writing: all or nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from small_runs import small_run, trainer_for

from xdlm import UserError, files, load
from xdlm.config import dump_config
from xdlm.files import atomic_folder, write_atomic
from xdlm.tokens import TextTokenizer
from xdlm.training import saving
from xdlm.training.checkpoint import (
    MODEL,
    OPTIMIZER,
    RAW,
    Content,
    clear_run,
    latest_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from xdlm.training.parallel import only_run_in, refuse_second_run
from xdlm.training.tensors import layout_of_file, save_tensors


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
    assert sorted(p.name for p in run.iterdir()) == [".lock", "log.jsonl", before.name]


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


def test_atomic_folder_never_replaces_anything(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with atomic_folder(target) as scratch:  # an empty folder is as good as none
        (scratch / "new").write_text("new")
    with pytest.raises(UserError, match="already exists"), atomic_folder(target):
        pass
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_folder_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch) -> None:
    """With what is in it and the list of that."""
    synced: list[Path] = []
    monkeypatch.setattr(files, "_sync", synced.append)
    with atomic_folder(tmp_path / "folder") as scratch:
        (scratch / "below").mkdir()
        (scratch / "below" / "file").write_text("written")
    inside = [scratch / "below", scratch / "below" / "file"]
    assert sorted(synced[:2]) == inside and synced[2:] == [scratch, tmp_path]


def test_export_spares_what_is_there(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(UserError, match="already exists"):
        load(checkpoint, device="cpu").save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_a_run_touches_only_its_own_checkpoints(tmp_path: Path) -> None:
    notes = tmp_path / "step-0-my-notes"
    notes.mkdir()
    (tmp_path / "step-99999999").mkdir()
    (tmp_path / "step-notes.txt").write_text("mine")
    trainer_for(small_run(tmp_path, steps=4, save_every=1, keep=1)).run()
    assert latest_checkpoint(tmp_path).name == "step-00000004"
    clear_run(tmp_path)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == [".lock", "step-0-my-notes", "step-99999999", "step-notes.txt"]


def test_incomplete_manifest(checkpoint: Path) -> None:
    file = checkpoint / "checkpoint.json"
    meta = json.loads(file.read_text())
    for change, says in (
        ({"files": {**meta["files"], "config.yaml": {}}}, "no size and hash for config.yaml"),
        ({"files": []}, "lacks one of"),
        ({"files": {"config.yaml": meta["files"]["config.yaml"],
                    "tokenizer.json": meta["files"]["tokenizer.json"]}}, "it is not a model"),
    ):  # fmt: skip
        file.write_text(json.dumps({**meta, **change}))
        with pytest.raises(UserError, match=says):
            load(checkpoint)


def test_write_atomic_keeps_the_old_content_on_failure(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomic(target, "old")
    with pytest.raises(UserError):
        write_atomic(target / "below", "new")
    assert target.read_text() == "old"


def test_write_atomic_leaves_devices_and_links_alone(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    write_atomic(Path("/dev/null"), "nothing")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(UserError, match="it is a folder"):
        write_atomic(tmp_path, "new")


def test_resuming_with_another_tokenizer_or_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three four five six seven. " * 200)
    config = small_run(tmp_path / "run", steps=2)
    config = replace(config, data=replace(config.data, train=str(tmp_path / "a.txt"), limit=None))
    trainer_for(config).run()
    checkpoint = open_checkpoint(latest_checkpoint(tmp_path / "run"))
    trainer = trainer_for(config)
    trainer.tokenizer = TextTokenizer.train(["some other text"], 300)
    with pytest.raises(UserError, match="is not the tokenizer it was"):
        trainer.restore(checkpoint)
    (tmp_path / "a.txt").write_text("seven six five four three two one. " * 200)
    with pytest.raises(UserError, match="is not the text it was"):
        trainer_for(config).restore(checkpoint)


def test_steps_may_change_unless_the_learning_rate_depends_on_them(tmp_path: Path) -> None:
    for decay in (0, 2):
        config = small_run(tmp_path / str(decay), steps=2)
        config = replace(config, optim=replace(config.optim, decay=decay))
        trainer_for(config).run()
        longer = trainer_for(replace(config, train=replace(config.train, steps=4)))
        checkpoint = open_checkpoint(latest_checkpoint(tmp_path / str(decay)))
        if decay:
            with pytest.raises(UserError, match=r"train\.steps was 2"):
                longer.restore(checkpoint)
        else:
            longer.restore(checkpoint)
            assert longer.run()
    shorter = trainer_for(small_run(tmp_path / "0", steps=1))
    shorter.restore(open_checkpoint(latest_checkpoint(tmp_path / "0")))
    with pytest.raises(UserError, match="at step 4 already"):
        shorter.run()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch) -> None:
    """What is written is the state at the time of the save, whatever has happened to it since."""
    may_write = threading.Event()

    def held_back(folder: Path, content: Content) -> None:
        assert may_write.wait(60)
        save_checkpoint(folder, content)

    monkeypatch.setattr(saving, "save_checkpoint", held_back)
    trainer = trainer_for(small_run(tmp_path))
    for _ in range(2):
        trainer.take_step()
    then = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    moments = {
        name: trainer.optimizer.tensors()[f"exp_avg.{name}"].clone()
        for name, _ in trainer.model.named_parameters()
    }
    averages = {name: value.clone() for name, value in trainer.ema.average.items()}
    trainer.save()
    for _ in range(2):
        trainer.take_step()
    assert latest_checkpoint(tmp_path) is None
    assert not torch.equal(trainer.model.out.bias, then["out.bias"])
    may_write.set()
    assert trainer._saver.failure(wait=True) is None
    checkpoint = open_checkpoint(latest_checkpoint(tmp_path))
    assert checkpoint.step == 2
    raw, model, optimizer = (checkpoint.tensors(file) for file in (RAW, MODEL, OPTIMIZER))
    for name, value in then.items():
        assert torch.equal(raw[name], value) and torch.equal(model[name], averages[name])
        assert torch.equal(optimizer[f"exp_avg.{name}"], moments[name])


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path, monkeypatch) -> None:
    """At once, not at the next checkpoint: here after step 4."""

    def no_room(folder: Path, content: Content) -> None:
        raise UserError("no room")

    monkeypatch.setattr(saving, "save_checkpoint", no_room)
    trainer = trainer_for(small_run(tmp_path, steps=1000, save_every=2))
    take_step = trainer.take_step

    def after_the_write() -> object:
        trainer._saver.failure(wait=True)
        return take_step()

    monkeypatch.setattr(trainer, "take_step", after_the_write)
    with pytest.raises(UserError, match="no room"):
        trainer.run()
    assert trainer.step in (2, 3)


def test_what_a_kill_left_behind_is_cleared(tmp_path: Path) -> None:
    for rest in (".step-00000007.partial", ".step-00000003.removed"):
        (tmp_path / rest).mkdir()
        (tmp_path / rest / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".mine.partial").mkdir()
    trainer_for(small_run(tmp_path, steps=1)).run()
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == [".lock", ".mine.partial", "log.jsonl", "step-00000001"]


def test_two_runs_never_write_to_one_folder(tmp_path: Path) -> None:
    """Nor does one begin where another has been since it looked for a checkpoint."""
    trainer_for(small_run(tmp_path, steps=2)).run()
    log = (tmp_path / "log.jsonl").read_bytes()
    being_written = tmp_path / ".step-00000004.partial"
    being_written.mkdir()
    trainer = trainer_for(small_run(tmp_path))
    refuse_second_run(tmp_path)
    for begin in (trainer.run, partial(refuse_second_run, tmp_path)):
        with (
            only_run_in(tmp_path),
            pytest.raises(UserError, match=f"another process is training in {tmp_path}"),
        ):
            begin()
    assert being_written.is_dir() and (tmp_path / "log.jsonl").read_bytes() == log
    with pytest.raises(UserError, match="step-00000002 is of a later step than 0"):
        trainer.run()
    assert (tmp_path / "log.jsonl").read_bytes() == log
    trainer.restore(open_checkpoint(latest_checkpoint(tmp_path)))
    assert trainer.run()


def test_without_locks_a_run_warns_and_goes_on(tmp_path: Path, monkeypatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\)"):
        assert trainer_for(small_run(tmp_path, steps=1)).run()


def test_a_diverged_run_saves_nothing(tmp_path: Path, monkeypatch) -> None:
    trainer = trainer_for(small_run(tmp_path, steps=30, save_every=1, log_every=30, keep=1))
    take_step = trainer.take_step

    def poisoned():
        result = take_step()
        if trainer.step == 4:
            trainer.model.out.bias.data[0] = torch.nan
        return result

    monkeypatch.setattr(trainer, "take_step", poisoned)
    with pytest.raises(UserError, match="weights are not finite at step 4"):
        trainer.run()
    assert latest_checkpoint(tmp_path).name == "step-00000003"


def test_weights_as_bytes_come_back_within_half_a_step(tmp_path: Path) -> None:
    """A step is the 127th part of a row's largest weight; what is no matrix is in bfloat16."""
    model = load("pocket", device="cpu")
    generator = torch.Generator().manual_seed(0)
    for (
        weight
    ) in model.denoiser.parameters():  # those of the bundled model may have been bytes before
        weight.normal_(generator=generator)
    model.save(tmp_path / "bytes", dtype=torch.int8)
    again = dict(load(tmp_path / "bytes", device="cpu").denoiser.named_parameters())
    for name, weight in model.denoiser.named_parameters():
        if weight.ndim == 2:
            step = weight.abs().amax(1, keepdim=True) / 127
            assert ((weight - again[name]).abs() <= 0.501 * step).all(), name
        else:
            torch.testing.assert_close(again[name], weight, rtol=2**-8, atol=0)
    assert (tmp_path / "bytes" / MODEL).stat().st_size < 1.1 * sum(
        p.numel() for p in again.values()
    )


def test_bytes_are_kept_when_they_are_written_again(tmp_path: Path) -> None:
    load("pocket", device="cpu").save(tmp_path / "once", dtype=torch.int8)
    load(tmp_path / "once", device="cpu").save(tmp_path / "again", dtype=torch.int8)
    once, again = ((tmp_path / name / MODEL).read_bytes() for name in ("once", "again"))
    assert once == again


@pytest.mark.parametrize("scale", [None, torch.ones(3)])
def test_bytes_without_their_multipliers_are_refused(tmp_path: Path, scale) -> None:
    tensors = {"w": torch.ones(4, 5, dtype=torch.int8)} | (
        {} if scale is None else {"w#scale": scale}
    )
    save_tensors(tensors, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="w is of type I8"):
        layout_of_file(tmp_path / "x.safetensors")


def test_weights_are_as_readable_as_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "any").touch()
    save_tensors({"weight": torch.zeros(2)}, tmp_path / "new.safetensors")
    save_tensors({"weight": torch.ones(2)}, tmp_path / "new.safetensors")
    modes = [(tmp_path / name).stat().st_mode for name in ("any", "new.safetensors")]
    assert modes[0] == modes[1]
