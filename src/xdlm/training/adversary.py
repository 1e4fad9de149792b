"""Someone for a codec to convince, so that it makes details up where least squares would blur them.

Of what its codes do not keep, a decoder that minimises squares can only show the mean of all that may have
been there. A critic of patches (Isola et al. 2017) that learns to tell images x from what is decoded, y,
sees that at once; the codec learns to please it (Esser et al. 2021):

    critic: mean max(0, 1 - D(x)) + mean max(0, 1 + D(y))
    codec:  squares + codes + weight |g_s|/|g_D| mean -D(y)

where g_s and g_D are the gradients of the squares and of -D(y) in the weights of the decoder's last layer:
with weight 1 both pull there alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xdlm.tokens.vq import group_norm

#: Pixels along a side of what one verdict stands for: images are halved twice.
PATCH = 4
#: No pull is scaled up by more than this.
_MOST = 1e4


class PatchCritic(nn.Module):
    """Images [n, 3, h, w] to verdicts on their patches [n, 1, h/4, w/4], high where one looks real."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.LeakyReLU(0.2)]
        for wide in (width, 2 * width):
            layers += [
                nn.Conv2d(wide, 2 * wide, 4, stride=2, padding=1, bias=False),
                group_norm(2 * wide),
                nn.LeakyReLU(0.2),
            ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(4 * width, 1, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        verdict: Tensor = self.layers(images)
        return verdict


class Adversary:
    """A critic that learns beside a codec."""

    def __init__(self, weight: float, lr: float, device: torch.device | None) -> None:
        self.weight, self.critic = weight, PatchCritic().to(device)
        on_gpu = next(self.critic.parameters()).is_cuda
        self._optimizer = torch.optim.Adam(
            self.critic.parameters(), lr=lr, betas=(0.5, 0.9), fused=on_gpu
        )

    def pull(self, made: Tensor, squares: Tensor, last_weight: Tensor) -> Tensor:
        """What is added to a codec's loss; `last_weight` is where the two gradients are compared."""
        self.critic.requires_grad_(False)
        unconvincing = -self.critic(made).mean()
        norms = [
            torch.linalg.vector_norm(torch.autograd.grad(loss, last_weight, retain_graph=True)[0])
            for loss in (squares, unconvincing)
        ]
        scale = (norms[0] / (norms[1] + 1e-6)).clamp_max(_MOST)
        return self.weight * scale * unconvincing

    def learn(self, original: Tensor, made: Tensor) -> Tensor:
        """One step of the critic; its loss, which is 2 where it cannot tell them apart."""
        self.critic.requires_grad_(True)
        real, false = self.critic(original), self.critic(made.detach())
        loss = F.relu(1 - real).mean() + F.relu(1 + false).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return loss.detach()
