"""What is claimed of memory, and of speed as ratios, at the paper's size."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from xdlm.evaluation.speed import (
    IN_TURN,
    OURS,
    PLAIN,
    Speed,
    SpeedSetting,
    measure,
    measure_in_turn,
    repeats_of,
)
from xdlm.models import PRESETS
from xdlm.models.graphed import release_workspaces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="the figures are of a Hopper GPU",
    ),
]
#: The paper's, timed a few times.
SETTING = SpeedSetting(
    model=replace(PRESETS["small"], dropout=0.1), n_tokens=50_257, batch=32, length=1024, steps=32, k=0.1,
    kept_rows=0.1, device=torch.device("cuda"), dtype=torch.bfloat16, compiled=False, warmup=5, repeats=20,
    sample_repeats=3,
)  # fmt: skip
METHODS = ("mdlm", "gidd", "xdlm", "udlm")
TASKS = ("forward", "train", "sample")


def by_task(cells: Iterator[Speed]) -> dict[str, Speed]:
    return {cell.task: cell for cell in cells}


def test_memory_and_speed_beside_the_plain_way(figure) -> None:
    gc.collect()
    release_workspaces()
    left = torch.cuda.memory_allocated() / 1e9  # by other tests
    ours = by_task(measure("xdlm", SETTING, OURS, TASKS))
    plain = by_task(measure("xdlm", replace(SETTING, repeats=5), PLAIN, TASKS))
    for task, most, faster in (("forward", 1.0, 5.0), ("train", 12.5, 4.5), ("sample", 1.2, 10.0)):
        times = ours[task].tokens_per_s / plain[task].tokens_per_s
        figure(f"{task}: {ours[task].peak_gb:.2f} GB, {times:.1f} times plain")
        assert ours[task].peak_gb - left <= most
        assert times > faster


def test_noise_of_other_kinds_costs_what_masks_cost(figure) -> None:
    """Beside the speeds, their standard errors; no more than is claimed, and three of those."""
    setting = replace(SETTING, repeats=30, sample_repeats=6)
    cells = list(measure_in_turn(METHODS, setting, ("train", "sample")))
    by_name = {(cell.method, cell.task): cell for cell in cells}
    for method, most in (("xdlm", 0.03), ("gidd", 0.1), ("udlm", 0.1)):
        for task in ("train", "sample"):
            cell, masks = by_name[method, task], by_name["mdlm", task]
            speed = masks.seconds / cell.seconds
            n = repeats_of(IN_TURN, task, setting)
            se = speed * sum((c.spread / c.seconds) ** 2 / n for c in (cell, masks)) ** 0.5
            figure(f"{method} {task}: {speed:.1%} +- {se:.1%} of mdlm")
            assert speed > 1 - most - 3 * se
