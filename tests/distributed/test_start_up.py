"""What two processes that share a model's weights hold of them before the first step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import METHODS, NANO, finish, free_port, launch, recipe, script_of

from xdlm.api import load_tokenizer
from xdlm.cli.train import make_trainer
from xdlm.config import dump_config, load_config
from xdlm.models import LladaConfig, build_denoiser
from xdlm.training.folders import write_published
from xdlm.training.note import Note

pytestmark = pytest.mark.xdist_group("processes")
TOKENIZER = load_tokenizer("pocket")
#: 49 MB, of which the largest tensor has a 12th.
SHAPE = LladaConfig(
    depth=3, width=512, heads=8, mlp_width=1536, vocab_size=TOKENIZER.size + 3,
    mask_id=TOKENIZER.size + 1,
)  # fmt: skip

#: The most memory of its own (files that are mapped are not) that a process came to have until it could
#: train, and the loss of a step, for each recipe. The first run is there to have everything imported.
MEASURE = """
import gc, json, os, sys, threading
from pathlib import Path
from xdlm.api import load_tokenizer
from xdlm.cli.train import make_trainer
from xdlm.config import load_config
from xdlm.training.parallel import join_world
from xdlm.training.trained import find_model

def held():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])

def watch(over, seen):
    while not over.wait(0.001):
        seen.append(held())

with join_world() as world:
    for file in map(Path, sys.argv[1:]):
        config = load_config(file)
        tokenizer = load_tokenizer(config.data.tokenizer)
        before, seen, over = held(), [], threading.Event()
        watcher = threading.Thread(target=watch, args=(over, seen))
        watcher.start()
        trainer = make_trainer(config, tokenizer, world)
        if config.start():
            trainer.start_from(find_model(config.start()))
        over.set()
        watcher.join()
        trainer.take_step()
        found = {"bytes": max(seen) - before, "loss": trainer._mean_since_log()[0]}
        file.with_suffix(f".{world.rank}").write_text(json.dumps(found))
        del trainer
        gc.collect()
        gc.freeze()
os._exit(0)  # there is nothing to tidy up
"""


def without_average(file: Path) -> Path:
    """A recipe that keeps no second set of weights."""
    config = load_config(file)
    file.write_text(dump_config(replace(config, optim=replace(config.optim, ema=0.0))))
    return file


def run_two(arguments: list[Path]) -> None:
    """Processes that find each other without a launcher, which would take seconds to start."""
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    memory = {"MALLOC_MMAP_THRESHOLD_": "262144"}  # what is freed is gone at once
    processes = [
        launch(arguments, processes=1, environment={**meeting, **memory, "RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        for process in processes:
            finish(process)
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_no_process_ever_holds_more_than_its_part(tmp_path: Path) -> None:
    """Of a model that is drawn, and of one that is read from several files; and the loss is that of one
    process that has built it whole."""
    hub = tmp_path / "hub"
    runs: dict[str, dict[str, Any]] = {
        "before": {"model": NANO}, "drawn": {"model": SHAPE}, "read": {"model": SHAPE, "start": str(hub)},
    }  # fmt: skip
    files = [
        without_average(recipe(tmp_path, METHODS["xdlm"], name, batch=2, parallel="fsdp", **how))
        for name, how in runs.items()
    ]
    config = load_config(files[1])
    torch.manual_seed(config.train.seed)
    whole = build_denoiser(SHAPE, SHAPE.vocab_size)
    size = 4 * sum(p.numel() for p in whole.parameters())
    note = Note(config, 0, "raw")
    write_published(hub, whole, TOKENIZER, note, "", shard_bytes=size // 5)
    assert len(list(hub.glob("*.safetensors"))) > 3
    run_two([script_of(tmp_path, MEASURE), *files])
    trainer = make_trainer(config, TOKENIZER)
    trainer.take_step()
    loss, _ = trainer._mean_since_log()
    for file in files[1:]:
        found = [json.loads(file.with_suffix(f".{rank}").read_text()) for rank in range(2)]
        assert found[0]["loss"] == pytest.approx(loss, rel=1e-5)
        for each in found:
            assert 0.4 * size < each["bytes"] < 0.75 * size
