"""Muon for a GPU: all matrices of one shape at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn


class StackedMuon(torch.optim.Muon):
    """As torch's, but for rounding, with `adjust_lr_fn="match_rms_adamw"`.

    With momentum `m <- lerp(g, m, mu)` and `U S V^T` of `lerp(g, m, mu)`, a matrix [A, B] changes by

        -lr 0.2 sqrt(max(A, B)) U V^T - lr decay W

    torch's own takes one matrix after another through some twenty small kernels; here the layers of a
    model, whose matrices are alike, go through them as one stack.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stacks: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    stacks.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in stacks.items():
                update = self._update(parameters, group)
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * 0.2 * max(shape) ** 0.5
                torch._foreach_add_(parameters, update, alpha=-rate)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        gradients = [p.grad for p in parameters if p.grad is not None]
        momenta = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momenta.append(state["momentum_buffer"])
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
        stack = orthogonal(torch.stack(ahead), group["ns_coefficients"], group["ns_steps"])
        return list(stack.to(parameters[0].dtype).unbind())


def orthogonal(
    stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float = 1e-7
) -> Tensor:
    """About `U V^T` of each matrix `U S V^T` in a stack [N, A, B], in bfloat16: `steps` times the odd
    polynomial `a X + b (X X^T) X + c (X X^T)^2 X`, which takes singular values in (0, 1] towards 1."""
    a, b, c = coefficients
    tall = stack.shape[1] > stack.shape[2]
    x = (stack.mT if tall else stack).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
