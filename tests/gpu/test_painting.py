"""What images are measured by and coded with, on a GPU: as on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_image_scores import draw, law_of
from test_images import grid, save_image, some_images
from test_vq import SMALL
from torch import nn

from xdlm.cli.main import main
from xdlm.cli.measures import image as command
from xdlm.data import load_images
from xdlm.evaluation.images import Inception, fid, fid_error, kid, precision_recall
from xdlm.evaluation.records import read_records
from xdlm.tokens import Pixels
from xdlm.training.codec import save_codec, train_codec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")


def random_inception() -> Inception:
    torch.manual_seed(0)
    network = Inception()
    for name, parameter in network.named_parameters():
        if name.endswith("weight"):
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        else:
            nn.init.constant_(parameter, float(name.endswith("var")))
    return network.eval().requires_grad_(False)


def test_features_do_not_depend_on_where_they_are_found() -> None:
    images = torch.from_numpy(some_images(4, 32))
    network = random_inception()
    expected = network(images)
    found = network.to(GPU)(images.to(GPU)).cpu()
    assert expected.std() > 0
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_scores_do_not_depend_on_it_either() -> None:
    one, other = draw(300, 24, seed=1), draw(260, 24, seed=2, shift=0.3)
    laws, moved = [law_of(part) for part in (one, other)], [part.to(GPU) for part in (one, other)]
    there = [law.to(GPU) for law in laws]
    assert fid(*there) == pytest.approx(fid(*laws), rel=1e-9)
    assert fid_error(*there, moved[1]) == pytest.approx(fid_error(*laws, other), rel=1e-6)
    assert kid(*moved) == pytest.approx(kid(one, other), rel=1e-9)
    assert precision_recall(*moved) == precision_recall(one, other)


def test_a_codec_learns_and_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a critic; its codes are those of a CPU, but for cells on the edge between two."""
    images = np.random.default_rng(0).integers(0, 256, (64, 1, 1, 3), dtype=np.uint8)
    source = str(tmp_path / "colours.png")
    save_image(grid(np.broadcast_to(images, (64, 8, 8, 3)), 8), tmp_path / "colours.png")
    rows, errors = load_images(source, Pixels(8)), []
    codec = train_codec(
        rows, SMALL, steps=200, batch=16, device=GPU, on_step=lambda at: errors.append(at.error)
    )
    assert np.isfinite(errors).all() and errors[-1] < errors[0] / 2
    pictures = Pixels(8).decode(rows.take(range(64)))
    codes = codec.encode(pictures)
    save_codec(codec, tmp_path / "codec")
    assert (codec.cpu().encode(pictures) == codes).mean() > 0.99

    network = random_inception().to(GPU)
    monkeypatch.setattr(command, "load_inception", lambda weights, device: network)
    main(["eval", "image", "--images", source, "--data", source, "--side", "8", "--device", GPU.type,
          "--codec", str(tmp_path / "codec"), "--records", str(tmp_path / "r.jsonl")])  # fmt: skip
    assert [r.metric for r in read_records(tmp_path / "r.jsonl")] == [
        "real_fid", "real_kid", "real_precision", "real_recall",
    ]  # fmt: skip
