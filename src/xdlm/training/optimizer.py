"""AdamW, or Muon beside it; the learning rate over the run; and their state as plain named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from xdlm.config import OptimConfig
from xdlm.models import Denoiser
from xdlm.training.blocks import blocks_of
from xdlm.training.checkpoint import OPTIMIZER, Checkpoint
from xdlm.training.muon import StackedMuon
from xdlm.training.sharding import own_part

#: What is kept for a weight between steps, beside their number.
_MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    StackedMuon: ("momentum_buffer",),
}


class Optimizer:
    """All trained weights, each in the hands of one of torch's optimisers.

    AdamW has all of them, or (`muon`) those that are not matrices inside of blocks. Muon (Jordan et al.
    2024) makes the update of a matrix orthogonal, `U V^T` of its momentum `U S V^T`, and scales it to the
    size that AdamW's would have (Liu et al. 2025), so that one learning rate and decay serve both.
    """

    def __init__(self, denoiser: Denoiser, config: OptimConfig) -> None:
        trained = {name: p for name, p in denoiser.named_parameters() if p.requires_grad}
        matrices = _matrices(denoiser) if config.kind == "muon" else set()
        rest = [p for p in trained.values() if p not in matrices]
        self._names = {p: name for name, p in trained.items()}
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                rest, lr=config.lr, betas=(config.beta1, config.beta2),
                weight_decay=config.weight_decay, fused=rest[0].is_cuda,
            )
        ]  # fmt: skip
        if matrices:
            self.parts.append(
                StackedMuon(
                    [p for p in trained.values() if p in matrices], config.lr, config.weight_decay
                )
            )

    def step(self, rate: float) -> None:
        """With the gradients that are there, at this learning rate; they are gone afterwards."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The moments, by parameter name: `exp_avg.blocks.0.qkv.weight` and so on."""
        return {
            f"{moment}.{name}": part.state[parameter][moment]
            for part, parameter, name in self._weights()
            for moment in _MOMENTS[type(part)]
            if parameter in part.state
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        moments = {}
        for part, parameter, name in self._weights():
            state = part.state[parameter]
            if isinstance(part, torch.optim.AdamW):
                place = parameter.device if parameter.is_cuda else "cpu"
                state["step"] = torch.tensor(float(checkpoint.step), device=place)
            for moment in _MOMENTS[type(part)]:
                state[moment] = moments[f"{moment}.{name}"] = torch.zeros_like(parameter).detach()
        checkpoint.read_into(OPTIMIZER, moments)

    def _weights(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter, str]]:
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    yield part, parameter, self._names[parameter]


def _matrices(denoiser: Denoiser) -> set[nn.Parameter]:
    """Those of blocks: an embedding's or a head's rows are tokens, with gradients of their own."""
    return {
        p for block in blocks_of(denoiser) for p in block.parameters()
        if p.ndim == 2 and p.requires_grad
    }  # fmt: skip


def learning_rate(config: OptimConfig, step: int, total: int) -> float:
    """The rate of step number `step` (from 0): linear warm-up, constant, optional linear decay."""
    rise = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    fall = min(1.0, (total - step) / config.decay) if config.decay else 1.0
    return config.lr * rise * fall


def clip_gradients(
    model: nn.Module, largest: float, total: Callable[[Tensor], Tensor] = lambda part: part
) -> Tensor:
    """Scale the gradient down to a norm of `largest` if it has more; returns the norm that it had.

    Where weights are sharded, `total` adds up what the processes found in their parts.
    """
    gradients = [own_part(p.grad) for p in model.parameters() if p.grad is not None]
    norms = torch._foreach_norm(gradients, 2, torch.float64)
    norm = total(torch.stack(list(norms)).square().sum()).sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor.float())
    return norm
