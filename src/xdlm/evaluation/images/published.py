"""The Inception weights of 2015 as pytorch-fid publishes them (pt_inception-2015-12-05.pth):
the names of torchvision's layers, batch norms with a scale of 1, and the classes behind the features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from xdlm.errors import UserError
from xdlm.tokens.torch_file import read_torch_file

_PLAIN = {
    "Conv2d_1a_3x3": "conv", "Conv2d_2a_3x3": "conv_1", "Conv2d_2b_3x3": "conv_2",
    "Conv2d_3b_1x1": "conv_3", "Conv2d_4a_3x3": "conv_4",
}  # fmt: skip
_POOL = {"branch_pool": "tower_2.conv"}
_A = {
    "branch1x1": "conv", "branch5x5_1": "tower.conv", "branch5x5_2": "tower.conv_1",
    "branch3x3dbl_1": "tower_1.conv", "branch3x3dbl_2": "tower_1.conv_1",
    "branch3x3dbl_3": "tower_1.conv_2", **_POOL,
}  # fmt: skip
_B = {
    "branch3x3": "conv", "branch3x3dbl_1": "tower.conv", "branch3x3dbl_2": "tower.conv_1",
    "branch3x3dbl_3": "tower.conv_2",
}  # fmt: skip
_C = {
    "branch1x1": "conv", "branch7x7_1": "tower.conv", "branch7x7_2": "tower.conv_1",
    "branch7x7_3": "tower.conv_2", "branch7x7dbl_1": "tower_1.conv",
    **{f"branch7x7dbl_{i}": f"tower_1.conv_{i - 1}" for i in range(2, 6)}, **_POOL,
}  # fmt: skip
_D = {
    "branch3x3_1": "tower.conv", "branch3x3_2": "tower.conv_1", "branch7x7x3_1": "tower_1.conv",
    **{f"branch7x7x3_{i}": f"tower_1.conv_{i - 1}" for i in range(2, 5)},
}  # fmt: skip
_E = {
    "branch1x1": "conv", "branch3x3_1": "tower_conv", "branch3x3_2a": "tower_mixed_conv",
    "branch3x3_2b": "tower_mixed_conv_1", "branch3x3dbl_1": "tower_1_conv",
    "branch3x3dbl_2": "tower_1_conv_1", "branch3x3dbl_3a": "tower_1_mixed_conv",
    "branch3x3dbl_3b": "tower_1_mixed_conv_1", "branch_pool": "tower_2_conv",
}  # fmt: skip
_BLOCKS = {
    "Mixed_5b": _A, "Mixed_5c": _A, "Mixed_5d": _A, "Mixed_6a": _B, "Mixed_6b": _C, "Mixed_6c": _C,
    "Mixed_6d": _C, "Mixed_6e": _C, "Mixed_7a": _D, "Mixed_7b": _E, "Mixed_7c": _E,
}  # fmt: skip
_PARTS = {"conv.weight": "weight", "bn.bias": "beta", "bn.running_mean": "mean",
          "bn.running_var": "var"}  # fmt: skip
#: The scale of batch norms, which this network has none of, and a record of training.
_SCALE, _COUNTER = "bn.weight", "bn.num_batches_tracked"


def read_published(file: Path) -> dict[str, Tensor]:
    """All weights under the names that `Inception` has for them, and the classes as `fc.weight`."""
    content = read_torch_file(file)
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{file} is not the Inception of 2015: it has no table of weights")
    layers, found = dict(published_layers()), {}
    for name, tensor in content.items():
        layer, part = _split(name)
        if layer in layers and part in _PARTS:
            found[f"{layers[layer]}.{_PARTS[part]}"] = tensor
        elif part == _SCALE and not bool((tensor == 1).all()):
            raise UserError(f"{file} is not the Inception of 2015: '{name}' is not 1")
        elif part not in (_SCALE, _COUNTER):
            found[name] = tensor
    return found


def published_layers() -> Iterator[tuple[str, str]]:
    """Names there and here."""
    yield from _PLAIN.items()
    for number, (block, branches) in enumerate(_BLOCKS.items()):
        for branch, place in branches.items():
            yield f"{block}.{branch}", f"mixed{f'_{number}' if number else ''}.{place}"


def _split(name: str) -> tuple[str, str]:
    """`Mixed_5b.branch1x1.bn.bias` is the part `bn.bias` of a layer."""
    pieces = name.split(".")
    return ".".join(pieces[:-2]), ".".join(pieces[-2:])
