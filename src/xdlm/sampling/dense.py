"""Reverse steps that hold all logits: the slow twin of the thinned one, and draws as others make them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from xdlm.models import run_trunk
from xdlm.ops import categorical, forbid
from xdlm.ops.blocks import blocks
from xdlm.ops.head import guided
from xdlm.sampling.filters import Filter
from xdlm.sampling.reverse import Leg, Run, Stepped
from xdlm.sampling.step import StepUniforms
from xdlm.structs import is_special

#: Logits that are held at a time by `step_by_gumbel_noise`: many on a GPU, on a CPU what caches hold.
_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}


def step_densely(
    run: Run, leg: Leg, z: Tensor, uniforms: StepUniforms, reshape: Filter | None
) -> Stepped:
    """Every row through the head, the whole posterior in float64, one draw from it. Which of its tokens
    came from the noise it does not know: it says what the model thinks of every one."""
    logits = _logits(run, leg, run.denoiser.head, hidden_states(run, leg, z))
    reshaped = logits if reshape is None else reshape(logits)
    posterior = run.process.posterior_between(reshaped.double().softmax(-1), z, leg.at_s, leg.at_t)
    drawn = categorical(posterior.log().flatten(0, 1), uniforms.token.flatten()).view(z.shape)
    after = drawn if run.free is None else torch.where(run.free, drawn, z)
    probs = None
    if run.record:
        p_after = logits.softmax(-1).gather(-1, after[..., None])[..., 0]
        written = (after != z) & ~is_special(after, run.process.special_ids)
        probs = torch.where(written, p_after, torch.nan)
    everyone = torch.ones(len(z), dtype=torch.bool, device=z.device)
    return Stepped(after, everyone, z.numel(), probs)


def step_by_gumbel_noise(
    run: Run, leg: Leg, z: Tensor, uniforms: StepUniforms, reshape: Filter | None
) -> Stepped:
    """As published implementations draw: the posterior in float32, and the token of the largest
    `weight / E` with `E = -log u` from uniform numbers u of 24 bits.

    The smallest E is 2^-24: a token with less than about 2^-24 of another's weight hardly ever wins. In T
    steps a masked position has 1/T of the weight of staying to give away, and so loses tokens of a
    probability below about T 2^-24, as if the temperature fell with the number of steps (Zheng et al.
    2024, arXiv 2409.02908). For comparisons with such figures; `step_densely` draws what the model says.
    Numbers are drawn for a batch as a whole: another batch gives other sequences.
    """
    process, states = run.process, [s.flatten(0, 1) for s in hidden_states(run, leg, z)]
    bridge = process.bridge(leg.at_s, leg.at_t)
    redrawn = bridge.b.at(z).flatten()
    moves = redrawn > 0  # else it can only have come from itself
    moves = moves if run.free is None else moves & run.free.flatten()
    at = moves.nonzero()[:, 0]
    before, batch = z.flatten(), at // z.shape[1]
    after, probs = before.clone(), torch.full_like(before, torch.nan, dtype=torch.float32)
    seed = int(uniforms.token.flatten()[:1].sum() * 2**53)  # the first sequence's, if there is one
    generator = torch.Generator(z.device).manual_seed(seed)
    elements = _ELEMENTS["cpu" if z.device.type == "cpu" else "cuda"]
    for part in blocks(len(at), run.denoiser.n_states, elements):
        rows, at_s = at[part], leg.at_s.index(batch[part])
        logits = _logits(run, leg, run.head.logits, [state[rows] for state in states])
        p = (logits if reshape is None else reshape(logits)).softmax(-1)
        alpha, b = (value[:, None].to(p.dtype) for value in (at_s.alpha, at_s.b.tok))
        weight = torch.addcmul(b, p, alpha)
        for i, token in enumerate(process.special_ids):
            weight[:, token] = at_s.b.special[:, i].to(p.dtype)
        here = before[rows]
        stays = 1 + bridge.alpha[batch[part]] / redrawn[rows]
        kept = weight.gather(1, here[:, None]) * stays[:, None].to(p.dtype)
        weight.scatter_(1, here[:, None], kept)
        drawn = weight.div_(exponential_noise(weight, generator)).argmax(-1)
        after[rows] = drawn
        if run.record:
            thought = logits.softmax(-1).gather(1, drawn[:, None])[:, 0]
            written = (drawn != here) & ~is_special(drawn, process.special_ids)
            probs[rows] = torch.where(written, thought, torch.nan).float()
    everyone = torch.ones(len(z), dtype=torch.bool, device=z.device)
    recorded = probs.view(z.shape) if run.record else None
    return Stepped(after.view(z.shape), everyone, len(at), recorded)


def exponential_noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """`1e-10 - log(u + 1e-10)` in float32, with u of 24 bits: between 2^-24 and 23.03."""
    noise = torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)
    return torch.rsub(noise.add_(1e-10).log_(), 1e-10)


def hidden_states(run: Run, leg: Leg, z: Tensor, of: Tensor | slice = slice(None)) -> list[Tensor]:
    """Hidden states of the sequences `of`, and under guidance those without labels."""
    z = z[of]
    label, padding = (None if each is None else each[of] for each in (run.label, run.padding))
    t = torch.full(z.shape[:1], leg.t, device=z.device)
    labels = [label] if run.guidance.at(leg.t) == 1 else [label, None]
    # A recorded trunk gives the same memory at every call.
    return [run_trunk(run.denoiser, z, t, each, padding).clone() for each in labels]


def _logits(run: Run, leg: Leg, head: Callable[[Tensor], Tensor], states: list[Tensor]) -> Tensor:
    logits, *unlabelled = map(head, states)
    if unlabelled:
        logits = guided(logits, unlabelled[0], run.guidance.at(leg.t))
    return forbid(logits, run.process.special_ids)
