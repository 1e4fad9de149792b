"""The VQ codec: exact codes, the published layout, a loss that teaches it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from test_images import grid, save_image, some_images

from xdlm.cli.main import main
from xdlm.data import ImageRows, load_images
from xdlm.errors import UserError
from xdlm.tokens import Pixels
from xdlm.tokens.vq import VqCodec, VqConfig, load_codec, read_llamagen
from xdlm.training.codec import save_codec, train_codec

SMALL = VqConfig(channels=8, multipliers="1-2", blocks=1, latent=8, codes=32, code_width=4)


def small() -> VqCodec:
    torch.manual_seed(0)
    return VqCodec(SMALL).eval()


def test_images_become_codes_and_codes_images() -> None:
    codec, images = small(), some_images(3, 8)
    codes = codec.encode(images)
    assert codes.shape == (3, 16) and 0 <= codes.min() <= codes.max() < 32
    again = codec.decode(codes)
    assert again.shape == images.shape and again.dtype == np.uint8
    np.testing.assert_array_equal(codec.decode(codes), again)
    np.testing.assert_array_equal(codec.encode(images[1:2]), codes[1:2])


def test_a_code_is_the_nearest_vector() -> None:
    """By distance between vectors of length 1, computed the long way; and a code is nearest to itself."""
    table, width = small().quantize, 4
    vectors = torch.nn.functional.normalize(torch.randn(1, width, 5, 6), dim=1)
    distance = torch.cdist(vectors[0].flatten(1).T, table.vectors())
    assert torch.equal(table.nearest(vectors).flatten(), distance.argmin(1))
    own = table.vectors().T.reshape(1, width, 4, 8)
    assert torch.equal(table.nearest(own).flatten(), torch.arange(32))


def test_the_loss_teaches_every_part() -> None:
    codec = small().train()
    losses = codec.losses(some_images(2, 8))
    losses.total().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in codec.parameters())
    assert codec.encoder.conv_in.weight.grad.abs().max() > 0  # past the choice of codes


def image_rows(folder: Path) -> ImageRows:
    """Images of one colour each."""
    colours = np.random.default_rng(0).integers(0, 256, (16, 1, 1, 3), dtype=np.uint8)
    save_image(grid(np.broadcast_to(colours, (16, 8, 8, 3)), 4), folder / "colours.png")
    return load_images(str(folder / "colours.png"), Pixels(8))


def test_a_codec_is_trained_kept_and_read_back(tmp_path: Path) -> None:
    rows, seen = image_rows(tmp_path), []
    codec = train_codec(rows, SMALL, steps=150, batch=16, lr=3e-3, on_step=seen.append)
    assert seen[-1].error < seen[0].error / 2
    images = Pixels(8).decode(rows.take(range(16)))
    codes = codec.encode(images)
    assert len(np.unique(codes)) > 8
    error = np.abs(codec.decode(codes).astype(int) - images.astype(int)).mean()
    assert error < 50  # of 255; colours at random are 85 apart
    save_codec(codec, tmp_path / "codec")
    again, images = load_codec(tmp_path / "codec"), some_images(2, 8)
    np.testing.assert_array_equal(again.encode(images), codec.encode(images))
    with pytest.raises(UserError, match="already exists"):
        save_codec(codec, tmp_path / "codec")
    (tmp_path / "codec" / "codec.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="does not match"):
        load_codec(tmp_path / "codec")
    with pytest.raises(UserError, match="is missing"):
        load_codec(tmp_path / "absent")


def test_training_a_codec_repeats(tmp_path: Path) -> None:
    rows = image_rows(tmp_path)
    one, other = (train_codec(rows, SMALL, steps=3, batch=4, seed=5) for _ in range(2))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_codec_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    image_rows(tmp_path)
    command = ["codec", "--data", str(tmp_path / "colours.png"), "--out", str(tmp_path / "codec"),
               "--side", "8", "--steps", "2", "--batch", "4", "--device", "cpu",
               "--shape.channels", "8", "--shape.codes", "16"]  # fmt: skip
    main(command)
    assert load_codec(tmp_path / "codec").config.codes == 16
    for flags, message in (([], "already exists"), (["--out", str(tmp_path / "b"), "--side", "6"],
                                                   "must be a multiple of 4")):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            main([*command, *flags])
        assert stop.value.code == 2 and message in capsys.readouterr().err


def layout(codec: VqCodec) -> str:
    lines = sorted(f"{name} {tuple(value.shape)}" for name, value in codec.state_dict().items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_the_published_layout() -> None:
    with torch.device("meta"):
        codec = VqCodec(VqConfig())
    assert sum(p.numel() for p in codec.parameters()) == 71_883_403
    assert layout(codec) == "5324ab6f1aa4885c9b932afde773324df917d13f8d119a38f179b626dd6a48ff"
    assert codec.config.shrink == 16


def published(codec: VqCodec) -> dict[str, object]:
    """As LlamaGen's files are: weights under a name, with a record of training among them."""
    weights = {**codec.state_dict(), "quantize.codebook_used": torch.zeros(65536)}
    return {"model": weights, "steps": 5}


def test_published_weights_are_read_strictly(tmp_path: Path) -> None:
    codec, file = small(), tmp_path / "vq.pt"
    torch.save(published(codec), file)
    images = some_images(2, 8)
    np.testing.assert_array_equal(read_llamagen(file, SMALL).encode(images), codec.encode(images))
    with pytest.raises(UserError, match="another codec: it has no 'decoder"):
        read_llamagen(file, VqConfig(channels=8, multipliers="1-2-2", blocks=1))
    with pytest.raises(UserError, match=r"another codec: .* is \(32, 4\), not \(32, 8\)"):
        read_llamagen(file, VqConfig(channels=8, multipliers="1-2", blocks=1, latent=8, codes=32))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="damaged"):
        read_llamagen(file, SMALL)
    with pytest.raises(UserError, match="no codec at"):
        read_llamagen(tmp_path / "absent.pt")


class Danger:
    def __reduce__(self):
        return print, ("a pickle ran",)


def test_a_file_that_holds_more_than_weights_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torch.save({"model": Danger()}, tmp_path / "vq.pt")
    with pytest.raises(UserError, match="holds more than weights") as caught:
        read_llamagen(tmp_path / "vq.pt", SMALL)
    assert "\n" not in str(caught.value) and "a pickle ran" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"junk" * 100, b"PK\3\4 junk", bytes(64)])
def test_a_damaged_file_of_weights_gets_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "vq.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"vq.pt is damaged[^\n]*[a-z]$"):
        read_llamagen(tmp_path / "vq.pt", SMALL)


def test_bad_input_gets_one_line() -> None:
    codec = small()
    with pytest.raises(UserError, match="a side that is a multiple of 2"):
        codec.encode(some_images(1, 7))
    with pytest.raises(UserError, match="square colour images"):
        codec.encode(some_images(1, 8)[..., 0])
    with pytest.raises(UserError, match="do not make a square"):
        codec.decode(np.zeros((1, 15), dtype=np.int64))
    with pytest.raises(UserError, match=r"codes must lie in 0\.\.31"):
        codec.decode(np.full((1, 16), 32))
    with pytest.raises(UserError, match="multipliers must read like"):
        VqConfig(multipliers="1,2")
