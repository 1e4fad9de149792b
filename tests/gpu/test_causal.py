"""The causal trunk on a GPU, however it is run: no state depends on a later token."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from xdlm.models import DiT, DiTConfig, run_trunk
from xdlm.structs import Batch
from xdlm.training.blocks import checkpoint_blocks, compile_blocks
from xdlm.training.device import compile_trunk
from xdlm.training.loss import NextTokenLoss, next_token_nats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = DiTConfig(depth=2, width=128, heads=2, cond_width=16, dropout=0.1)
LENGTH, VOCAB = 96, 50


def awake(dtype: torch.dtype = torch.float32) -> DiT:
    torch.manual_seed(0)
    model = DiT(CONFIG, VOCAB, causal=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to("cuda", dtype)


def without_kernels(model: DiT) -> None:
    model.kernels = model.replayable = False


#: How a trunk may be run; `run_trunk` records it from the second call on where nothing forbids it.
WAYS = {
    "recorded": lambda model: None,
    "plain torch": without_kernels,
    "computed twice": checkpoint_blocks,
    "compiled": compile_trunk,
    "compiled by blocks": compile_blocks,
}


def state_changes(model: DiT, place: int) -> torch.Tensor:
    """How much the state at each position changes with one token; the same dropout both times."""
    generator = torch.Generator("cuda").manual_seed(1)
    z = torch.randint(0, VOCAB, (4, LENGTH), device="cuda", generator=generator)
    other = z.clone()
    other[:, place] = (z[:, place] + 1) % VOCAB
    states = []
    for tokens in (z, z, z, other):  # recorded by the third
        torch.manual_seed(7)
        states.append(run_trunk(model, tokens, torch.zeros(4, device="cuda")).detach().clone())
    return (states[-1] - states[-2]).float().abs().amax((0, 2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["train", "eval", "no gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_later_tokens_do_not_matter(way: str, mode: str, dtype: torch.dtype) -> None:
    model = awake(dtype).train(mode == "train")
    WAYS[way](model)
    with torch.set_grad_enabled(mode != "no gradient"):
        changed = state_changes(model, place := 40)
    assert (changed[:place] == 0).all()
    assert changed[place] > 0.01 and (changed[place:] > 0).float().mean() > 0.9


@pytest.mark.parametrize("impl", ["eager", "chunked", "fused"])
def test_the_loss_is_cross_entropy(impl: str) -> None:
    """Over recorded steps, with gradients, against torch's own in float64."""
    model, truth = awake().eval(), awake().double().eval()
    truth.kernels = truth.replayable = False
    for step in range(4):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randint(0, VOCAB, (4, LENGTH), device="cuda", generator=generator)
        index = torch.arange(4, device="cuda")
        sums = NextTokenLoss(impl)(model, Batch(x, index), seed=0, step=step, global_batch=4)
        (sums.loss / x.numel()).backward()
        hidden = truth.trunk(x, torch.zeros(4, device="cuda", dtype=torch.float64))
        logits = F.linear(hidden, truth.head_weight, truth.head_bias)[:, :-1]
        expected = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        expected.backward()
        torch.testing.assert_close(
            sums.loss.detach() / x.numel(), expected.detach(), rtol=1e-5, atol=0
        )
        for (name, ours), theirs in zip(model.named_parameters(), truth.parameters(), strict=True):
            if theirs.grad is not None:
                error = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
                assert error < 1e-3, name
        model.zero_grad()
        truth.zero_grad()
    with torch.no_grad():
        nats = next_token_nats(model, x).mean()
    torch.testing.assert_close(nats, expected.detach(), rtol=1e-5, atol=0)
