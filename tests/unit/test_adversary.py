"""A codec's adversary: what it pulls at, how hard, and that it learns to tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_images import grid, save_image, some_images
from torch.nn import functional as F

from xdlm.data import load_images
from xdlm.errors import UserError
from xdlm.tokens import Pixels
from xdlm.tokens.vq import VqConfig
from xdlm.training.adversary import Adversary
from xdlm.training.codec import CodecStep, train_codec

SMALL = VqConfig(8, "1-2", blocks=1, latent=8, codes=16, code_width=4)


@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_the_pull_is_measured_against_that_of_the_squares(weight: float) -> None:
    torch.manual_seed(0)
    last = torch.nn.Conv2d(4, 3, 3, padding=1)
    made, original = last(torch.randn(2, 4, 8, 8)), torch.randn(2, 3, 8, 8)
    adversary, squares = Adversary(weight, 1e-3, None), F.mse_loss(made, original)
    pull = adversary.pull(made, squares, last.weight)
    by_pull, by_squares = (
        torch.autograd.grad(loss, last.weight, retain_graph=True)[0] for loss in (pull, squares)
    )
    assert float(by_pull.norm()) == pytest.approx(weight * float(by_squares.norm()), rel=1e-2)
    pull.backward()
    assert all(parameter.grad is None for parameter in adversary.critic.parameters())


def test_the_critic_learns_to_tell_sharp_from_blurred() -> None:
    torch.manual_seed(0)
    adversary = Adversary(1.0, 1e-3, None)
    losses = []
    for _ in range(30):
        sharp = torch.rand(8, 3, 16, 16).round() * 2 - 1
        blurred = F.avg_pool2d(sharp, 3, stride=1, padding=1)
        losses.append(float(adversary.learn(sharp, blurred)))
    assert losses[0] == pytest.approx(2, abs=0.5)  # it cannot tell yet
    assert losses[-1] < 0.2
    assert (adversary.critic(sharp) > adversary.critic(blurred)).all()
    assert adversary.critic(sharp).shape == (8, 1, 4, 4)


def test_a_codec_is_left_alone_at_first(tmp_path: Path) -> None:
    pictures = some_images(16, 8)
    save_image(grid(pictures, 4), tmp_path / "some.png")
    rows = load_images(str(tmp_path / "some.png"), Pixels(8))

    def errors(realism: float, steps: int = 75) -> dict[int, float]:
        told: list[CodecStep] = []
        train_codec(rows, SMALL, steps=steps, batch=4, realism=realism, on_step=told.append)
        return {now.step: now.error for now in told}

    plain, pulled = errors(0.0), errors(0.5)
    assert [plain[step] == pulled[step] for step in (1, 25, 26, 50, 75)] == 3 * [True] + 2 * [False]
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="realism must be"):
            errors(wrong, steps=1)
    save_image(grid(some_images(4, 2), 2), tmp_path / "tiny.png")
    rows = load_images(str(tmp_path / "tiny.png"), Pixels(2))
    with pytest.raises(UserError, match="patches of 4 x 4 pixels, and images have 2"):
        errors(0.5, steps=1)
