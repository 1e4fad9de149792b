"""What is claimed of speed and memory at the paper's size, with room for what other tests left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from xdlm.evaluation.speed import OURS, PLAIN, Speed, SpeedSetting, measure, measure_in_turn
from xdlm.models import PRESETS

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
TASKS = ("forward", "train", "sample")


def by_task(cells: Iterator[Speed]) -> dict[str, Speed]:
    return {cell.task: cell for cell in cells}


def test_memory_and_speed_beside_the_plain_way() -> None:
    ours = by_task(measure("xdlm", SETTING, OURS, TASKS))
    plain = by_task(measure("xdlm", replace(SETTING, repeats=5), PLAIN, TASKS))
    for task, most, faster in (("forward", 1.1, 5.0), ("train", 13.0, 4.5), ("sample", 1.3, 10.0)):
        assert ours[task].peak_gb is not None and ours[task].peak_gb <= most
        assert ours[task].tokens_per_s > faster * plain[task].tokens_per_s


def test_mixed_noise_costs_what_masks_cost() -> None:
    cells = list(measure_in_turn(("mdlm", "xdlm"), SETTING, ("train", "sample")))
    seconds = {(cell.method, cell.task): cell.seconds for cell in cells}
    for task in ("train", "sample"):
        assert seconds["mdlm", task] > 0.95 * seconds["xdlm", task]
