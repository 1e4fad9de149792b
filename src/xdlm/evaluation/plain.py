"""The straightforward implementation that speed is measured against.

All logits of all positions in float32, the forward laws and posteriors as dense vectors over the
vocabulary, float64 Gumbel noise for every draw, no compilation. Right, readable, and slow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.objective import elbo_weight
from xdlm.ops import forbid
from xdlm.sampling import plan_blocks
from xdlm.sampling.reverse import time_grid
from xdlm.structs import align


def plain_loss(
    denoiser: Denoiser, process: NoiseProcess, x: Tensor, t: Tensor, generator: torch.Generator
) -> Tensor:
    """The continuous-time loss of a batch, summed, from vectors over the vocabulary."""
    coefs = process.coefs(t)
    z = process.corrupt(x, t, generator=generator)
    logits = forbid(denoiser(z, t.float()), process.special_ids)
    probs = logits.softmax(-1)
    alpha = align(coefs.alpha, probs).float()
    noise = coefs.b.dense(process.vocab.size)[:, None].float()
    truth = torch.zeros_like(probs).scatter_(-1, x[..., None], 1.0) * alpha + noise
    model = probs * alpha + noise
    terms = torch.where(truth > 0, truth * (truth / model).log(), 0.0)
    rho = truth.gather(-1, z[..., None])[..., 0] / model.gather(-1, z[..., None])[..., 0]
    weight = elbo_weight(coefs, x, z).float()
    divergence = terms.sum(-1) + rho - 1 - rho.log()
    return torch.where(weight > 0, weight * divergence, 0.0).sum()


@torch.no_grad()
def plain_sample(
    denoiser: Denoiser,
    process: NoiseProcess,
    *,
    batch: int,
    length: int,
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    """Ancestral sampling from dense posteriors."""
    z = process.prior((batch, length), generator=generator)
    for leg in time_grid(process, steps, z[:, 0]):
        t = torch.full((batch,), leg.t, device=z.device)
        logits = forbid(denoiser(z, t), process.special_ids)
        posterior = process.posterior_between(logits.softmax(-1), z, leg.at_s, leg.at_t)
        u = torch.rand(posterior.shape, generator=generator, device=z.device, dtype=torch.float64)
        z = (posterior.log() - torch.log(-torch.log(u))).argmax(-1)
    return z


@torch.no_grad()
def plain_decode(
    denoiser: Denoiser,
    process: NoiseProcess,
    *,
    prompt: Tensor,
    n_new: int,
    steps: int,
    k: float,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """Algorithm 1 in one block behind prompts [B, P]: in every step all logits of all positions, and
    Gumbel noise on every one of them."""
    special = process.special_ids
    mask_id = special[0]
    z = torch.cat([prompt, prompt.new_full((len(prompt), n_new), mask_id)], 1)
    prompted = torch.arange(z.shape[1], device=z.device) < prompt.shape[1]
    (plan,) = plan_blocks(n_new, steps=steps, k=k)
    for fill, rewrite in zip(plan.topk_absorb, plan.topk_uniform, strict=True):
        logits = forbid(denoiser(z, torch.zeros(len(z), device=z.device)), special)
        probs = logits.double().softmax(-1)
        u = torch.rand(logits.shape, generator=generator, device=z.device, dtype=torch.float64)
        drawn = (logits.double() - temperature * torch.log(-torch.log(u))).argmax(-1)
        sure, present = (probs.gather(-1, v[..., None])[..., 0] for v in (drawn, z))
        masked = z == mask_id
        doubted = ~masked & ~prompted & (drawn != z) & (sure >= present)
        for n, where in ((fill, masked), (rewrite, doubted)):
            best = torch.where(where, sure, -torch.inf).topk(n)
            chosen = torch.zeros_like(where).scatter(1, best.indices, best.values > -torch.inf)
            z = torch.where(chosen, drawn, z)
    return z
