"""Memory of prompts and finished blocks: exact where it should be, and near elsewhere."""

from __future__ import annotations

import pytest
import torch
from decoding import COLD, MASK, PROCESS, N, Small, refreshed, with_room

from xdlm import UserError, load
from xdlm.models import Denoiser, DiT, DiTConfig
from xdlm.models.llada import Llada, LladaConfig
from xdlm.sampling import ConfidenceConfig, decode
from xdlm.sampling.memory import Memory


def shaken(depth: int, kind: type[Denoiser] = DiT) -> Denoiser:
    torch.manual_seed(depth)
    shape = {"depth": depth, "width": 16, "heads": 2}
    if kind is DiT:
        model: Denoiser = DiT(DiTConfig(**shape, cond_width=4, dropout=0.0), N).eval()
    else:
        model = Llada(LladaConfig(**shape, mlp_width=24, vocab_size=N, mask_id=MASK), N).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.double()


@pytest.mark.parametrize("kind", [DiT, Llada])
def test_memory_is_exact_where_it_should_be(kind: type[Denoiser]) -> None:
    """Anew in every step; or one layer deep, where what others show depends on their tokens alone."""
    for depth, refresh in ((3, 1), (1, 2), (1, 100)):
        model = shaken(depth, kind)
        plain = refreshed(model, None)
        assert torch.equal(plain.tokens, refreshed(model, refresh).tokens)
        assert len(set(plain.ends.tolist())) > 1, "rows end at different times, and leave the rest"


@pytest.mark.parametrize("kind", [DiT, Llada])
@torch.no_grad()
def test_memory_is_an_approximation_elsewhere(kind: type[Denoiser]) -> None:
    """Three layers deep the remembered states are stale, and the more so the older they are."""
    model = shaken(3, kind)
    z = torch.full((4, 30), MASK)
    z[:, :6] = torch.randint(8, N, (4, 6), generator=torch.Generator().manual_seed(3))
    memory, span, t, rows = Memory(model, 100), slice(10, 20), torch.zeros(4), torch.arange(4)
    whole = memory.hidden(z, t, rows, span)
    assert torch.allclose(whole, model.trunk(z, t)[:, span])
    errors = [0.0]
    for position in range(10, 16):
        z[:, position] = 8 + position % 5
        exact = model.trunk(z, t)[:, span]
        errors.append(float((memory.hidden(z, t, rows, span) - exact).abs().max()))
    assert 0 < errors[1] < errors[-1] < float(exact.abs().max())


def test_memory_costs_what_a_block_costs() -> None:
    model = shaken(2)
    seen: list[int] = []
    inner = model.trunk_at
    model.trunk_at = lambda z, *rest: (seen.append(z.shape[1]), inner(z, *rest))[1]
    nothing = torch.zeros(1, 16, dtype=torch.int64)
    config = ConfidenceConfig(steps=8, block_length=8, refresh=3, k=0.5)
    out = decode(model, PROCESS, given=nothing, frozen=nothing.bool(), config=config, record=True)
    assert seen == [16, 8, 8, 16] * 2, "all where a block begins and every three steps"
    later = out.trajectory.frames[4:, 0, :8]
    assert (later == later[0]).all(), "a finished block is not rewritten"


def test_a_backbone_without_memory_says_so() -> None:
    nothing = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(UserError, match="leave refresh out"):
        decode(
            Small(), PROCESS, given=nothing, frozen=nothing.bool(),
            config=ConfidenceConfig(steps=4, refresh=2),
        )  # fmt: skip
    with pytest.raises(UserError, match="refresh must be at least 1"):
        ConfidenceConfig(refresh=0)


@torch.no_grad()
def test_memory_of_a_trained_model_is_close() -> None:
    """The difference that was measured at length: some hundredths of a nat at most, and not none."""
    model = load("pocket", device="cpu")
    ids = model.tokenizer.encode("It was a dark night, and the old man sat by the fire, and said")
    prompt = torch.tensor([ids[:14]])
    given, frozen = with_room(prompt, 32)
    config = ConfidenceConfig(steps=16, block_length=16, filter=COLD)
    run = decode(
        model.denoiser, model.process, given=given, frozen=frozen, config=config, record=True
    )
    memory, span = Memory(model.denoiser, 8), slice(14, 30)
    total, mask_id = 0.0, model.process.vocab.mask_id
    for z in run.trajectory.frames[:8].long():
        states = (
            model.denoiser.trunk(z, torch.zeros(1))[:, span],
            memory.hidden(z, torch.zeros(1), torch.arange(1), span),
        )
        exact, recalled = (model.denoiser.head(h)[..., :mask_id].log_softmax(-1) for h in states)
        total += float((exact.exp() * (exact - recalled)).sum(-1)[z[:, span] == mask_id].sum())
    assert 1e-4 < total / (16 + 14 + 12 + 10 + 8 + 6 + 4 + 2) < 0.05
