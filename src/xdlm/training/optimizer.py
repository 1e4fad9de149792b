"""AdamW, its learning rate over the run, and its state as plain named tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from xdlm.config import OptimConfig
from xdlm.training.checkpoint import OPTIMIZER, Checkpoint
from xdlm.training.sharding import own_part

_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    on_gpu = trained[0].is_cuda
    return torch.optim.AdamW(
        trained,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=on_gpu,
    )


def learning_rate(config: OptimConfig, step: int, total: int) -> float:
    """The rate of step number `step` (from 0): linear warm-up, constant, optional linear decay."""
    rise = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    fall = min(1.0, (total - step) / config.decay) if config.decay else 1.0
    return config.lr * rise * fall


def optimizer_tensors(optimizer: torch.optim.AdamW, model: nn.Module) -> dict[str, Tensor]:
    """The moments, by parameter name: `exp_avg.blocks.0.qkv.weight` and so on."""
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        for moment in _MOMENTS
        if parameter in optimizer.state
    }


def restore_optimizer(
    optimizer: torch.optim.AdamW, model: nn.Module, checkpoint: Checkpoint
) -> None:
    moments = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        place = parameter.device if parameter.is_cuda else "cpu"
        state["step"] = torch.tensor(float(checkpoint.step), device=place)
        for moment in _MOMENTS:
            state[moment] = moments[f"{moment}.{name}"] = torch.zeros_like(parameter).detach()
    checkpoint.read_into(OPTIMIZER, moments)


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
