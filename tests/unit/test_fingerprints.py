"""A fingerprint of weights: what changes it, what does not, what it reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from xdlm import UserError
from xdlm.training.fingerprints import fingerprint

#: Small ones, which are read as a whole, and one of which a part is.
SHAPES = {"a": (3, 5), "b": (7,), "large": (512, 512)}


def write(file: Path, *, changed: str | None = None, at: int = 0, **more: torch.Tensor) -> Path:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if changed is not None:
        tensors[changed].view(-1)[at] += 1e-6
    save_file({**tensors, **more}, file)
    return file


def test_any_number_of_a_small_tensor_counts(tmp_path: Path) -> None:
    found = {fingerprint([write(tmp_path / "x")])}
    places = [("a", i) for i in range(15)] + [("b", i) for i in range(7)]
    for name, at in [*places, ("large", 0), ("large", 512 * 512 - 1)]:
        found.add(fingerprint([write(tmp_path / "x", changed=name, at=at)]))
    assert len(found) == 1 + 15 + 7 + 2


def test_training_shows_in_a_large_tensor(tmp_path: Path) -> None:
    """Where it changes a number in a hundred, also in one of whose numbers one in 32 is read."""
    before = fingerprint([write(tmp_path / "x")])
    other = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    other[:, ::100] += 1e-6
    assert fingerprint([write(tmp_path / "x", large=other)]) != before


def test_names_shapes_and_files_count_and_places_do_not(tmp_path: Path) -> None:
    one, other = write(tmp_path / "x"), write(tmp_path / "y", changed="a")
    moved = tmp_path / "elsewhere" / "z"
    moved.parent.mkdir()
    shutil.copy(one, moved)
    assert fingerprint([moved, other]) == fingerprint([one, other])
    assert len({fingerprint(files) for files in ([one], [other], [one, other], [other, one])}) == 4
    more = fingerprint([write(tmp_path / "w", c=torch.zeros(0))])
    assert more != fingerprint([one])


def test_what_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "x")
    for content in (b"", b"abc", file.read_bytes()[:40], b"\xff" * 64):
        file.write_bytes(content)
        with pytest.raises(UserError, match="x: not a safetensors file"):
            fingerprint([file])
    with pytest.raises(UserError, match=r"cannot read .*nothing"):
        fingerprint([tmp_path / "nothing"])


def test_a_large_file_is_not_read_through(tmp_path: Path) -> None:
    def n_read() -> int:
        return int(Path("/proc/self/io").read_text().partition("rchar: ")[2].split()[0])

    file = tmp_path / "x"
    save_file({f"{i}": torch.zeros(1 << 21) for i in range(4)}, file)
    before = n_read()
    fingerprint([file])
    assert 4 * 8 * 4096 <= n_read() - before < 0.03 * file.stat().st_size
