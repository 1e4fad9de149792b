"""No operation in a step makes the host wait until the GPU has done all that it was given.

torch raises where one would. What it lets pass is the wait for an event: `PickedRows.order` waits for
counts that were taken before the trunk began, and so arrive while that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from xdlm import Vocab
from xdlm.models import DiT, DiTConfig
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform
from xdlm.sampling import SamplerConfig, sample
from xdlm.structs import Batch
from xdlm.training.loss import DiffusionLoss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="a GPU before Hopper waits for how many rows are left in doubt",
    ),
]
SIZE, LENGTH, STEPS = 1001, 128, 16
every_process = pytest.mark.parametrize("process", [
    Masked(Vocab(SIZE, SIZE - 1)), Mixed(Vocab(SIZE, 7), k=0.1), Uniform(Vocab(SIZE)),
    Gidd(Vocab(SIZE, SIZE - 1)),
], ids=["masked", "mixed", "uniform", "gidd"])  # fmt: skip


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def awake() -> DiT:
    torch.manual_seed(0)
    model = DiT(DiTConfig(depth=2, width=128, heads=2, cond_width=16, dropout=0.1), SIZE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.to("cuda", torch.bfloat16)


def test_waiting_is_found() -> None:
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device="cuda").sum().item()


@every_process
def test_steps_of_a_sampler_do_not_wait(process: NoiseProcess) -> None:
    model, config = awake(), SamplerConfig(steps=STEPS)
    asked = []

    def watch(done: int, of: int) -> None:
        """From the first step to the last but one: the result is fetched after that."""
        asked.append(done)
        torch.cuda.set_sync_debug_mode("error" if done < of - 1 else "default")

    def run(on_step: Callable[[int, int], None] | None) -> None:
        sample(model, process, batch=8, length=LENGTH, config=config, on_step=on_step)

    run(None)  # records the trunk and compiles kernels
    try:
        run(watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(asked) == STEPS + 1


@every_process
def test_training_steps_do_not_wait(process: NoiseProcess) -> None:
    model, loss = awake().train(), DiffusionLoss(process, kept_rows=0.1)
    tokens = torch.randint(8, SIZE - 1, (8, LENGTH), device="cuda")

    def step(number: int) -> None:
        batch = Batch(tokens, number * 8 + torch.arange(8))
        loss(model, batch, seed=0, step=number, global_batch=8).loss.backward()
        model.zero_grad()

    for number in range(4):  # the trunk is recorded on the way
        step(number)
    with waiting_is_an_error():
        for number in range(4, 8):
            step(number)
