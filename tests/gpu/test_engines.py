"""Sharded weights in bfloat16 against a working copy, on one GPU: the same losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from xdlm import Vocab
from xdlm.config import TrainConfig
from xdlm.models import DiT, DiTConfig
from xdlm.noise import Mixed
from xdlm.structs import Batch
from xdlm.training.blocks import checkpoint_blocks
from xdlm.training.engine import Engine, Replicated, Sharded, make_engine
from xdlm.training.loss import DiffusionLoss
from xdlm.training.optimizer import clip_gradients
from xdlm.training.parallel import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=CUDA
    )
    yield
    dist.destroy_process_group()


def awake(dropout: float, **changes: bool) -> DiT:
    torch.manual_seed(0)
    config = DiTConfig(depth=3, width=128, heads=2, cond_width=16, dropout=dropout, **changes)
    model = DiT(config, 301)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def course(model: DiT, engine: Engine) -> list[tuple[float, float]]:
    """Loss and gradient norm of five steps of two micro batches each."""
    loss = DiffusionLoss(Mixed(Vocab(301, 300), k=0.1), kept_rows=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 300, (8, 96), generator=generator).cuda()
    found = []
    for step in range(5):
        torch.manual_seed(step)
        engine.refresh()
        total = 0.0
        for half in (0, 1):
            rows = slice(4 * half, 4 * half + 4)
            batch = Batch(tokens[rows], torch.arange(8)[rows])
            sums = loss(engine.running.train(), batch, seed=0, step=step, global_batch=8)
            engine.backward(sums.loss / tokens.numel(), last=half == 1)
            total += float(sums.loss) / tokens.numel()
        found.append((total, float(clip_gradients(model, 1.0, engine.total))))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("twice", [False, True], ids=["kept", "computed twice"])
def test_sharded_trains_as_a_working_copy_does(world_of_one: None, twice: bool) -> None:
    one, other = awake(0.0), awake(0.0)
    replicated = Replicated(one.to(CUDA), torch.bfloat16, World())
    if twice:
        checkpoint_blocks(other)
    sharded = Sharded(other, torch.bfloat16, CUDA)
    assert all(p.dtype == torch.float32 for p in other.parameters())
    for ours, theirs in zip(course(other, sharded), course(one, replicated), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)
    with torch.no_grad():
        tokens = torch.zeros(2, 64, dtype=torch.int64, device=CUDA)
        hidden = sharded.running.trunk(tokens, torch.rand(2, device=CUDA))
    assert hidden.dtype == torch.bfloat16
    sharded.release()
    assert all(hasattr(p, "to_local") for p in other.parameters())


def test_blocks_computed_twice_drop_the_same_numbers() -> None:
    """The kernels' dropout takes its seed from torch's generator, which is set back for the second time.
    With the time as a condition: without, what is not computed twice ends its last block row by row."""
    plain, twice = awake(0.3, time_conditioning=True), awake(0.3, time_conditioning=True)
    config = TrainConfig(activation_checkpointing=True)
    engines = [
        make_engine(model, settings, torch.float32, CUDA, World())
        for model, settings in ((plain, TrainConfig()), (twice, config))
    ]
    plain.replayable = False
    for ours, theirs in zip(course(twice, engines[1]), course(plain, engines[0]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
