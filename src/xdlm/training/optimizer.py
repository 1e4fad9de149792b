"""AdamW, its learning rate over the run, and its state as plain named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from xdlm.config import OptimConfig
from xdlm.training.checkpoint import OPTIMIZER, Checkpoint

_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(
        model.parameters(),
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
        state = optimizer.state[parameter]
        place = parameter.device if parameter.is_cuda else "cpu"
        state["step"] = torch.tensor(float(checkpoint.step), device=place)
        for moment in _MOMENTS:
            state[moment] = moments[f"{moment}.{name}"] = torch.zeros_like(parameter).detach()
    checkpoint.read_into(OPTIMIZER, moments)


def clip_gradients(model: nn.Module, largest: float) -> Tensor:
    """Scale the gradient down to a norm of `largest` if it has more; returns the norm that it had."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = get_total_norm(gradients)
    if isinstance(norm, DTensor):  # of each process's part
        norm = norm.full_tensor()
    clip_grads_with_norm_(model.parameters(), largest, norm)
    return norm
