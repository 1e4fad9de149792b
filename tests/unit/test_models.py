"""The DiT: shapes, invariances, conditioning."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from xdlm import UserError
from xdlm.models import PRESETS, DiT, DiTConfig, LevelDiTConfig, build_denoiser, layers
from xdlm.models.layers import rotary_angles, rotate
from xdlm.noise import LogLinear
from xdlm.training.blocks import checkpoint_blocks

NANO = PRESETS["nano"]


def awake(config: DiTConfig, vocab: int = 20) -> DiT:
    """A DiT whose zero-initialised parts have been shaken, so that everything matters."""
    torch.manual_seed(0)
    model = build_denoiser(config, vocab).eval()
    assert isinstance(model, DiT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_untrained_model_predicts_the_uniform_law() -> None:
    logits = DiT(NANO, 20)(torch.randint(0, 20, (2, 7)), torch.rand(2))
    assert logits.shape == (2, 7, 20)
    assert (logits == 0).all()


def test_paper_size() -> None:
    """12 x 768 with a GPT-2 vocabulary: the layers are 7.1 M a block, the model 169 M in all."""
    with torch.device("meta"):
        model = DiT(PRESETS["small"], 50258)
    total = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.blocks[0].parameters())
    width, cond = 768, 128
    assert block == 12 * width**2 + (4 + 1) * width + 2 * width
    assert sum(p.numel() for p in model.modulation.parameters()) == 74 * width * (cond + 1)
    assert total == pytest.approx(169.6e6, rel=0.01)


def test_attention_looks_both_ways() -> None:
    model = awake(NANO)
    z = torch.randint(0, 20, (1, 9))
    changed = z.clone()
    changed[0, 4] = (z[0, 4] + 1) % 20
    difference = (model(z, torch.zeros(1)) - model(changed, torch.zeros(1))).abs().amax(-1)[0]
    assert (difference > 0).all()


def test_rotary_depends_on_relative_position_only() -> None:
    angles = rotary_angles(12, 8, torch.device("cpu"))
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turned_q, turned_k = rotate(q.expand(12, 8), angles), rotate(k.expand(12, 8), angles)
    scores = turned_q @ turned_k.T
    for offset in range(5):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(12), rtol=1e-6, atol=1e-6)


def test_time_matters_only_when_asked() -> None:
    z = torch.randint(0, 20, (2, 5))
    early, late = torch.tensor([0.1, 0.1]), torch.tensor([0.9, 0.9])
    blind = awake(NANO)
    assert torch.equal(blind(z, early), blind(z, late))
    sighted = awake(dataclasses.replace(NANO, time_conditioning=True))
    assert not torch.allclose(sighted(z, early), sighted(z, late))


def test_a_level_is_what_is_left_of_the_data() -> None:
    """-log alpha of the log-linear schedule: a plain DiT that is given it as its time agrees."""
    shape = {"depth": 2, "width": 32, "heads": 2, "cond_width": 8, "dropout": 0.0}
    told = awake(LevelDiTConfig(**shape))
    plain = awake(DiTConfig(**shape, time_conditioning=True, time_scale=1.0))
    plain.load_state_dict(told.state_dict())
    z, t = torch.randint(0, 20, (4, 5)), torch.tensor([0.0, 0.3, 0.999, 1.0])
    level = -LogLinear(1e-3)(t.double()).alpha.log()
    assert level[-1] == pytest.approx(-math.log(1e-3))
    torch.testing.assert_close(told(z, t), plain(z, level))
    assert not torch.allclose(told(z, t), plain(z, t), atol=1e-3)
    for bad, says in (
        ({"time_conditioning": False}, "use kind dit"),
        ({"level_eps": 0.0}, "level_eps"),
    ):
        with pytest.raises(UserError, match=says):
            LevelDiTConfig(**shape, **bad)


def test_labels() -> None:
    model = awake(dataclasses.replace(NANO, n_classes=3))
    z, t = torch.randint(0, 20, (1, 5)), torch.zeros(1)
    outputs = [model(z, t, torch.tensor([label])) for label in (0, 1, 2, -1)]
    assert torch.equal(outputs[-1], model(z, t))
    for i in range(3):
        assert not torch.allclose(outputs[i], outputs[-1])
    with pytest.raises(UserError, match="without classes"):
        awake(NANO)(z, t, torch.tensor([0]))


def test_batch_entries_do_not_mix() -> None:
    model = awake(dataclasses.replace(NANO, time_conditioning=True))
    z, t = torch.randint(0, 20, (3, 6)), torch.tensor([0.1, 0.5, 0.9])
    together = model(z, t)
    alone = torch.cat([model(z[i : i + 1], t[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_head_on_some_rows_equals_the_whole() -> None:
    model = awake(NANO)
    z = torch.randint(0, 20, (2, 6))
    hidden = model.trunk(z, torch.zeros(2))
    torch.testing.assert_close(model.head(hidden[:, 3]), model(z, torch.zeros(2))[:, 3])


@pytest.mark.parametrize(
    ("changes", "n_states"), [({}, 3), ({"time_conditioning": True}, 1), ({"n_classes": 3}, 1)]
)
def test_finished_rows_equal_those_of_the_trunk(changes: dict[str, Any], n_states: int) -> None:
    """Values and gradients, whether the last block can be finished for some rows alone or not."""
    model = awake(dataclasses.replace(NANO, **changes))
    z, t = torch.randint(0, 20, (3, 11)), torch.rand(3)
    places = torch.tensor([30, 2, 7, 19, 12])
    for rows in (places, None, places[:0]):
        states = model.body(z, t)
        assert len(states) == n_states
        expected = model.trunk(z, t).flatten(0, 1)[slice(None) if rows is None else rows]
        found = model.finish(states, rows)
        torch.testing.assert_close(found, expected)
        direction = torch.linspace(-1, 1, found.numel()).view_as(found)
        gradients = [
            torch.autograd.grad((hidden * direction).sum(), list(model.parameters()), allow_unused=True)
            for hidden in (found, expected)
        ]  # fmt: skip
        for ours, theirs in zip(*gradients, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_block_that_was_changed_is_run_as_a_whole() -> None:
    class Halved(DiT):
        def trunk(
            self, z: torch.Tensor, t: torch.Tensor, label: torch.Tensor | None = None
        ) -> torch.Tensor:
            return super().trunk(z, t, label) / 2

    wrapped, hooked, derived = awake(NANO), awake(NANO), awake(NANO)
    checkpoint_blocks(wrapped)
    seen: list[object] = []
    hooked.blocks[-1].register_forward_hook(lambda *given: seen.append(given))
    derived.__class__ = Halved
    z, t = torch.randint(0, 20, (2, 5)), torch.rand(2)
    for model in (wrapped, hooked, derived):
        (hidden,) = model.body(z, t)
        torch.testing.assert_close(hidden, model.trunk(z, t))
    assert len(seen) == 2


def test_bad_shapes_are_named() -> None:
    with pytest.raises(UserError, match="multiple of 2 x heads"):
        DiTConfig(width=100, heads=3)
    with pytest.raises(UserError, match="dropout"):
        DiTConfig(dropout=1.0)


def test_a_compiler_is_not_led_into_questions_about_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether kernels can be compiled here says the package index and the driver, which it would trace."""
    monkeypatch.setattr(layers, "has_triton", lambda: pytest.fail("traced"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    on_gpu = cast(torch.Tensor, SimpleNamespace(is_cuda=True, dtype=torch.float32))
    assert not layers.kernels_can_run(on_gpu)
