"""Two processes against one, over gloo on the CPU: the same losses, the same weights, whoever goes on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from launching import (
    FAIL_ALL,
    METHODS,
    STUCK_WRITER,
    adapting,
    assert_same_run,
    finish,
    free_port,
    kill_all,
    last_words,
    launch,
    lines,
    losses,
    recipe,
    run_here,
    script_of,
    start,
    train_all,
    wait_for,
    workers_of,
)

from xdlm import UserError, load
from xdlm.training.checkpoint import (
    MODEL,
    checkpoint_folder,
    latest_checkpoint,
    open_checkpoint,
    run_checkpoints,
)

#: One at a time, on one worker: each of them starts processes enough for two cores.
pytestmark = pytest.mark.xdist_group("processes")


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """With all weights on both, gradients on their way before the last are there; and sharded, some with
    blocks that are computed twice, of a LLaDA that is trained on too. Three micro batches a step on one
    process, two on each of two."""
    validating = {
        "eval_every": 4,
        "eval_rows": 100,
    }  # batches that two cannot share evenly, and a tail
    (tmp_path / "val.txt").write_text(
        "The cat sat on the mat, and thought of something else. " * 150
    )
    files = []
    # Each process has one of the two micro batches that one alone has: the rest is a sum in float32.
    half = {"precision": "bfloat16", "micro_batch": 4}
    run_here(recipe(tmp_path, METHODS["xdlm"], "half-one", **half))
    for way in ("ddp", "fsdp"):
        files.append(recipe(tmp_path, METHODS["xdlm"], f"half-{way}", **half, parallel=way))
    for method, process in METHODS.items():
        run_here(recipe(tmp_path, process, f"{method}-one", **validating))
        files.append(recipe(tmp_path, process, f"{method}-ddp", **validating))
        twice = method in ("gidd", "xdlm")
        sharded = {"parallel": "fsdp", "activation_checkpointing": twice, **validating}
        files.append(recipe(tmp_path, process, f"{method}-fsdp", **sharded))
    llada = adapting(tmp_path)
    run_here(recipe(tmp_path, METHODS["xdlm"], "llada-one", **llada))
    files.append(recipe(tmp_path, METHODS["xdlm"], "llada-fsdp", **llada, parallel="fsdp"))
    train_all(files)
    assert_same_run(tmp_path / "llada-one", tmp_path / "llada-fsdp")
    assert_same_run(tmp_path / "half-ddp", tmp_path / "half-fsdp")
    for ours, theirs in zip(
        losses(tmp_path / "half-ddp"), losses(tmp_path / "half-one"), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-3)  # in half precision a bias added later shows
    for method in METHODS:
        one, ddp, fsdp = (tmp_path / f"{method}-{how}" for how in ("one", "ddp", "fsdp"))
        assert len(losses(one)) == 8 and len(lines(one, "val_nats")) == 2
        assert_same_run(one, ddp)
        assert_same_run(one, fsdp)
        early, of = map(int, ddp.with_suffix(".early").read_text().split(" of "))
        assert of > 4 and early >= of - 1, "gradients waited for the end of the backward pass"


@pytest.mark.slow
def test_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    """Two and then one, one and then two; what two wrote is a model like any other."""
    process, log = METHODS["xdlm"], {"log_every": 3}
    short = {**log, "steps": 5, "save_every": 1, "keep": 2}
    ways = ("ddp", "fsdp")
    run_here(recipe(tmp_path, process, "straight", **log))
    train_all([recipe(tmp_path, process, f"2-{way}-1", **short, parallel=way) for way in ways])
    for way in ways:
        two_then_one = tmp_path / f"2-{way}-1"
        kept = [folder.name for folder in run_checkpoints(two_then_one)]
        assert kept == ["step-00000004", "step-00000005"]
        assert (latest_checkpoint(two_then_one) / MODEL).is_file() == (way == "ddp")
        assert_damage_is_found(two_then_one / "step-00000004")
        assert_exports(two_then_one, tmp_path / f"exported-{way}")
        run_here(recipe(tmp_path, process, two_then_one.name, **log), resume=True)
        run_here(recipe(tmp_path, process, f"1-{way}-2", **short))
    train_all([recipe(tmp_path, process, f"1-{way}-2", **log, parallel=way) for way in ways])
    straight = {line[0]: line for line in losses(tmp_path / "straight")}
    for name in (f"{change}" for way in ways for change in (f"2-{way}-1", f"1-{way}-2")):
        changed = losses(tmp_path / name)
        assert [line[0] for line in changed] == [3, 5, 6, 8]  # the last of a run is logged too
        for line in (changed[0], changed[3]):
            assert line == pytest.approx(straight[line[0]], rel=1e-5)


def assert_damage_is_found(checkpoint: Path) -> None:
    file = next(checkpoint.rglob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file.name} is damaged"):
        load(checkpoint, device="cpu")


def assert_exports(run: Path, to: Path) -> None:
    loaded = load(run, device="cpu")
    loaded.save(to)
    samples = [m.sample(1, steps=2, length=8).tokens for m in (loaded, load(to, device="cpu"))]
    assert samples[0].tolist() == samples[1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_worker_is_replaced(tmp_path: Path, parallel: str) -> None:
    """kill -9 of one of two: both start again and go on from the last checkpoint by themselves, with sums
    for the next line of the log that both had begun; the other one has no more than a line to say.

    A run that meets at a given port has no number of its own.
    """
    process, often = METHODS["xdlm"], {"steps": 30, "save_every": 3, "log_every": 7}
    run_here(recipe(tmp_path, process, "straight", **often))
    run = tmp_path / "killed"
    file = recipe(tmp_path, process, run.name, **often, parallel=parallel)
    launcher = start(file, restarts=2, port=free_port() if parallel == "ddp" else None)
    wait_for(lambda: latest_checkpoint(run), launcher)
    workers = workers_of(launcher)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    assert "Traceback" not in finish(launcher)
    assert_same_run(tmp_path / "straight", run)


@pytest.mark.slow
def test_the_first_process_is_replaced_in_the_middle_of_a_checkpoint(tmp_path: Path) -> None:
    process, often = METHODS["xdlm"], {"save_every": 2}
    run_here(recipe(tmp_path, process, "straight", **often))
    script = script_of(tmp_path, STUCK_WRITER.format(note=tmp_path / "note", way="kill"))
    file = recipe(tmp_path, process, "killed", **often, parallel="fsdp")
    finish(launch([script, "train", file], restarts=1))
    assert (tmp_path / "note").exists()
    assert_same_run(tmp_path / "straight", tmp_path / "killed")


@pytest.mark.slow
def test_a_scheduler_ends_a_run(tmp_path: Path) -> None:
    """SIGTERM for all of them, and for the workers once more by their launcher: they save and stop."""
    run = tmp_path / "ended"
    launcher = start(recipe(tmp_path, METHODS["xdlm"], run.name, steps=10**6, save_every=0))
    wait_for(lambda: (run / "log.jsonl").exists() and losses(run), launcher)
    for pid in (*workers_of(launcher), launcher.pid):
        os.kill(pid, signal.SIGTERM)
    said = last_words(launcher)
    saved = open_checkpoint(latest_checkpoint(run))
    assert f"stopped at step {saved.step}, saved {saved.folder}" in said
    assert losses(run)[-1][0] == saved.step


@pytest.mark.slow
def test_what_ends_one_process_ends_all(tmp_path: Path) -> None:
    """A checkpoint's folder that is in the way, in the middle or at the end; a file that one of them cannot
    read again; a loss that is no number. None waits for the other, and both know why they stop."""
    process, sharded = METHODS["mdlm"], {"parallel": "fsdp"}
    for name, step in (("blocked", 4), ("blocked-last", 8)):
        (checkpoint_folder(tmp_path / name, step) / "of-somebody").mkdir(parents=True)
    files = [
        recipe(tmp_path, process, "blocked", save_every=1, **sharded),
        recipe(tmp_path, process, "blocked-last", save_every=0, **sharded),
        recipe(tmp_path, process, "diverged", lr=1e30, save_every=0),
        recipe(tmp_path, process, "unreadable", **sharded),
    ]
    finish(launch([script_of(tmp_path, FAIL_ALL), *files]))
    # Told by the one that failed, or by the next vote, whichever comes first.
    other = "another process could not write (its part of )?a checkpoint"
    for name, *reasons in (
        ("blocked", "step-00000004 already exists", other),
        ("blocked-last", "step-00000008 already exists", other),
        ("diverged", "the loss is nan", "the loss is nan"),
        ("unreadable", other, "cannot write .*: Input/output error"),
    ):
        for rank, reason in enumerate(reasons):
            assert re.search(reason, (tmp_path / f"{name}.{rank}").read_text())
    assert [folder.name for folder in run_checkpoints(tmp_path / "blocked")][-1] == "step-00000003"
    assert run_checkpoints(tmp_path / "unreadable") == []


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_in_the_middle_of_a_checkpoint(tmp_path: Path, processes: int) -> None:
    """kill -9 of all of a run while a checkpoint is half written, and training has gone on meanwhile."""
    process, often = METHODS["xdlm"], {"save_every": 2, "parallel": "fsdp"}
    run_here(recipe(tmp_path, process, "straight", **often))
    run, note = tmp_path / "killed", tmp_path / "note"
    script = script_of(tmp_path, STUCK_WRITER.format(note=note, way="sleep"))
    file = recipe(tmp_path, process, run.name, **often)
    killed = launch([script, "train", file], processes=processes)
    wait_for(lambda: note.exists() and losses(run)[-1][0] > 4, killed)
    kill_all(killed)
    scratch = Path(note.read_text())
    assert scratch.is_dir() and any(scratch.rglob("*.safetensors"))
    assert run_checkpoints(run) == [checkpoint_folder(run, 2)]
    if processes == 1:
        run_here(file, resume=True)
    else:
        finish(start(file, "--resume"))
    assert not scratch.exists()
    assert_same_run(tmp_path / "straight", run)


def test_a_batch_that_cannot_be_shared(tmp_path: Path) -> None:
    process = start(recipe(tmp_path, METHODS["mdlm"], "odd", batch=7))
    said = last_words(process)
    assert process.returncode != 0
    assert said.count("xdlm: train.batch 7 cannot be shared by 2 processes evenly") == 1
    assert not (tmp_path / "odd").exists()
