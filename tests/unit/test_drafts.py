"""Models that are put together without memory begin as those that are built as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from xdlm.config import DataConfig, LoraConfig, RunConfig, TrainConfig
from xdlm.models import (
    BACKBONES,
    Denoiser,
    DiTConfig,
    LevelDiTConfig,
    LladaConfig,
    ModelConfig,
    UNetConfig,
    build_denoiser,
)
from xdlm.models.contract import BackboneConfig
from xdlm.training import drafts
from xdlm.training.adapters import add_adapters, trained_parameters
from xdlm.training.device import place
from xdlm.training.drafts import draft

CPU = torch.device("cpu")
SIZE = 257
SHAPES: dict[str, ModelConfig] = {
    "dit": DiTConfig(depth=2, width=32, heads=2, cond_width=8, n_classes=3),
    "level-dit": LevelDiTConfig(depth=2, width=32, heads=2, cond_width=8),
    "llada": LladaConfig(
        depth=2, width=32, heads=2, mlp_width=48, vocab_size=SIZE, mask_id=SIZE - 1
    ),
    "unet": UNetConfig(side=4, channels=32, multipliers="1-2", attention=0, n_classes=3),
}


def made(config: RunConfig, **how: bool) -> Denoiser:
    blank = draft(config, SIZE, **how)
    assert all(p.is_meta for p in blank.denoiser.parameters())
    place(blank.denoiser, CPU)
    blank.fill()
    return blank.denoiser


@pytest.mark.parametrize("kind", sorted(BACKBONES.keys() - {"pretrained"}))
def test_the_same_numbers_to_the_bit(kind: str) -> None:
    """Weights, what torch's generator gives after them, and what the model says, tables included."""
    shape = SHAPES[kind]
    torch.manual_seed(3)
    built = build_denoiser(shape, SIZE)
    after = torch.rand(4)
    torch.manual_seed(3)
    found = made(RunConfig(model=shape, data=DataConfig(length=48)), to_be_read=False)
    assert torch.equal(torch.rand(4), after)
    ours, theirs = found.state_dict(), built.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with torch.no_grad():
        for parameter in (*found.parameters(), *built.parameters()):
            parameter.add_(torch.linspace(0, 0.1, parameter.numel()).view_as(parameter))
        z, t = torch.arange(48)[None] % SIZE, torch.tensor([0.3])
        assert torch.equal(found.eval()(z, t), built.eval()(z, t))


def test_weights_that_are_to_be_read_are_no_numbers_and_cost_no_draws() -> None:
    torch.manual_seed(3)
    found = made(RunConfig(model=SHAPES["llada"]), to_be_read=True)
    assert all(p.isnan().all() for p in found.parameters())
    after = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), after)


def test_adapters_begin_as_beside_weights_that_are_there(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    shape, lora = SHAPES["llada"], LoraConfig(rank=2)
    built = build_denoiser(shape, SIZE)
    torch.manual_seed(3)
    add_adapters(built, lora)
    torch.manual_seed(3)
    config = RunConfig(model=shape, lora=lora, train=TrainConfig(start=str(tmp_path)))
    found = made(config, to_be_read=True)
    ours, theirs = trained_parameters(found), trained_parameters(built)
    assert list(ours) == list(theirs) and len(theirs) == 2 * 7 * 2
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("way", ["drawn", "changed", "buffer"])
def test_what_cannot_be_noted_is_not_lost_in_silence(monkeypatch, way: str) -> None:
    def build(config: BackboneConfig, size: int, causal: bool) -> nn.Module:
        module = nn.Linear(4, 4)
        with torch.no_grad():
            if way == "drawn":
                module.weight = nn.Parameter(torch.randn(4, 4))
            elif way == "changed":
                module.weight.mul_(2)
            else:
                module.register_buffer("table", torch.zeros(4))
        return module

    monkeypatch.setattr(drafts, "build_denoiser", build)
    with pytest.raises(AssertionError, match=r"cannot be noted|nobody would fill"):
        draft(RunConfig(), SIZE, to_be_read=False)
