"""A model before it has weights: its shape, and what every weight begins as.

A model is put together on the meta device, where weights take no memory, and what would be written into
them is noted. Once it has been given memory, sharded or not, that is done, tensor by tensor: the numbers
are those of a model that was built as it is, and no process holds more than its own part and one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xdlm.config import RunConfig
from xdlm.models import Denoiser, PretrainedConfig, build_denoiser
from xdlm.training.adapters import add_adapters
from xdlm.training.sharding import own_part
from xdlm.training.tensors import fill

_ATEN = torch.ops.aten
#: What a new weight may be filled with: each of these leaves nothing of what was there.
_FILLS = {
    _ATEN.uniform_.default, _ATEN.normal_.default, _ATEN.fill_.Scalar, _ATEN.zero_.default,
}  # fmt: skip


class Fill(NamedTuple):
    """Something that a weight was filled with."""

    target: Tensor
    shape: torch.Size
    dtype: torch.dtype
    operation: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    def again(self) -> Tensor:
        """The same in memory of its own, with the next numbers of torch's generator."""
        return self.operation(torch.empty(self.shape, dtype=self.dtype), *self.arguments)


class _Notes(TorchDispatchMode):
    """Notes what weights without memory are filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.fills: list[Fill] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _FILLS:
            self.fills.append(Fill(args[0], args[0].shape, args[0].dtype, func, args[1:]))
            return args[0]
        # Other draws, and changes of what is there, would be lost.
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        assert not drawn and not func._schema.is_mutable, f"cannot be noted: {func}"
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Draft:
    """A model whose weights have no memory, and what they are to be filled with, in order. Of a backbone
    that cannot be built without memory (`fills` is None), the model as it is."""

    denoiser: Denoiser
    fills: list[tuple[str, Fill]] | None

    @torch.no_grad()
    def fill(self) -> None:
        """Once there is memory: every weight's first numbers; none where they are still to be read."""
        if self.fills is None:
            return
        weights = dict(self.denoiser.named_parameters())
        last = {name: i for i, (name, _) in enumerate(self.fills)}
        for name in weights.keys() - last.keys():
            own_part(weights[name]).fill_(torch.nan)
        for i, (name, noted) in enumerate(self.fills):
            if last[name] == i:
                fill(weights[name], noted.again())
            else:  # for nothing, but that what is drawn next depends on it
                noted.again()


def draft(config: RunConfig, vocab_size: int, *, to_be_read: bool) -> Draft:
    """The model of a configuration, with its adapters. Where the weights are `to_be_read`, only what
    adapters begin as is drawn."""
    causal = config.process.is_autoregressive
    if config.model.kind == PretrainedConfig.kind:  # transformers keeps tables in buffers
        denoiser = build_denoiser(config.model, vocab_size, causal=causal)
        if config.lora.rank:
            add_adapters(denoiser, config.lora)
        return Draft(denoiser, None)
    notes = _Notes()
    with torch.device("meta"), notes:
        denoiser = build_denoiser(config.model, vocab_size, causal=causal)
        assert not list(denoiser.buffers()), "nobody would fill them"
        if to_be_read:
            notes.fills.clear()
        if config.lora.rank:
            add_adapters(denoiser, config.lora)
    names = {id(weight): name for name, weight in denoiser.named_parameters()}
    return Draft(denoiser, [(names[id(noted.target)], noted) for noted in notes.fills])
