"""The ancestral sampler: from pure noise to data in a number of exact reverse steps.

Its start and end are those of the likelihood bound: the first step leaves pure noise (alpha = 0) and
the last, the final denoise, goes from the shortest time to the data. So `steps` steps cost at most
`steps + 1` forward passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from xdlm.errors import UserError, check_whole, did_you_mean
from xdlm.models import Denoiser, drawing_head, run_trunk
from xdlm.models.contract import in_eval_mode
from xdlm.noise import NoiseProcess
from xdlm.ops import Stream, uniform
from xdlm.ops.gather import PickedRows, ordered_rows
from xdlm.sampling.dense import step_by_gumbel_noise, step_densely
from xdlm.sampling.filters import Filter
from xdlm.sampling.guidance import Guidance
from xdlm.sampling.looking import Look
from xdlm.sampling.result import Sample, check_padding, find_ends, row_lengths
from xdlm.sampling.reverse import Leg, Run, Stepped, time_grid
from xdlm.sampling.seen import SeenRows, odds_at
from xdlm.sampling.settling import can_settle, settle
from xdlm.sampling.starved import step_starved
from xdlm.sampling.step import StepUniforms, apply_plan, is_noise, plan_step
from xdlm.sampling.watching import Watch

Last = Literal["sample", "argmax"]
#: How tokens are drawn: unless told otherwise, as published implementations do, and by the law of that.
THINNED, GUMBEL, STARVED = "thinned", "gumbel", "starved"


@dataclass(frozen=True)
class SamplerConfig:
    """How to sample."""

    steps: int = 32
    """Number of reverse steps before the final denoise."""
    filter: Filter = field(default_factory=Filter)
    """Temperature and nucleus, applied to every prediction."""
    guidance: Guidance = field(default_factory=Guidance)
    """How far to be led away from what the model says without labels."""
    last: Last = "sample"
    """How the final denoise picks tokens."""
    impl: str = THINNED
    """"thinned" runs the model where it is needed; "dense" is its slow twin; "gumbel" draws as published
    implementations do, by float32 Gumbel noise, which starves rare tokens the more steps there are;
    "starved" has nearly the law of that noise, and is several times as fast."""

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        if self.steps < 1:
            raise UserError(f"sampling needs at least 1 step, got {self.steps}")
        for value, known in ((self.last, get_args(Last)), (self.impl, tuple(STEPS))):
            if value not in known:
                raise UserError(f"unknown sampler option '{value}'{did_you_mean(value, known)}")


#: Savings less likely than e^-4 are not looked for.
_SURE = 4.0


@torch.no_grad()
@in_eval_mode
def sample(
    denoiser: Denoiser,
    process: NoiseProcess,
    *,
    batch: int,
    length: int,
    config: SamplerConfig | None = None,
    seed: int = 0,
    index: Tensor | None = None,
    given: Tensor | None = None,
    frozen: Tensor | None = None,
    padding: Tensor | None = None,
    label: Tensor | None = None,
    stop_ids: Sequence[int] = (),
    record: bool = False,
    on_step: Callable[[int, int], None] | None = None,
    on_frame: Callable[[Tensor], None] | None = None,
) -> Sample:
    """Draw `batch` sequences of `length` tokens.

    Positions where `frozen` [B, L] holds keep the tokens of `given` [B, L] throughout, under every
    noise type. Shorter rows have `padding` [B, L] behind them, which nobody looks at. Sequence i is a pure
    function of (seed, index[i]), where `index` counts from 0 unless given: batches of any size, and rows of
    any lengths beside it, give the same sequences up to the model's own rounding (but not under
    `impl="gumbel"`). `stop_ids` are looked for at the end: no step knows where a text will end.
    """
    config = config if config is not None else SamplerConfig()
    device = denoiser.device
    process.check_states(denoiser.n_states)
    if batch < 0 or length < 1 or (index is not None and index.shape != (batch,)):
        raise UserError(
            f"sampling needs a length of at least 1, and an index for each of the batch, got "
            f"{length} and {None if index is None else list(index.shape)} for a batch of {batch}"
        )
    index = (torch.arange(batch) if index is None else index).to(device)[:, None]
    position = torch.arange(length, device=device)[None]

    def draw(stream: Stream, step: int) -> Tensor:
        return uniform(seed, stream, index, position, step)

    z = process.prior((batch, length), uniform=draw(Stream.PRIOR, 0))
    z, free, padding = _with_given(denoiser, z, given, frozen, padding)
    if label is not None:
        label = _checked_labels(label, batch, denoiser.n_classes).to(device)
    elif config.guidance.scale != 1:
        raise UserError("guidance is away from what the model says without labels: give labels")
    head = drawing_head(denoiser, process.special_ids)
    n_free = length if free is None else int(free.sum(1).min())
    seen = SeenRows.of(head, z.numel()) if process.has_uniform_noise else None
    run = Run(denoiser, process, head, free, n_free, label, config.guidance, padding, record, seen)
    step_fn = STEPS[config.impl]
    watch = Watch(z, config.steps + 1, record=record, on_step=on_step, on_frame=on_frame)
    nfe = torch.zeros(batch, dtype=torch.int64, device=device)
    head_rows: int | Tensor = 0
    for i, leg in enumerate(time_grid(process, config.steps, index[:, 0])):
        uniforms = StepUniforms(
            *(draw(stream, i) for stream in
              (Stream.BRANCH, Stream.ACCEPT, Stream.TOKEN, Stream.NOISE))
        )  # fmt: skip
        stepped = step_fn(run, leg, z, uniforms, _filter_of(config, leg))
        z = stepped.z
        nfe += stepped.evaluated * (1 if config.guidance.at(leg.t) == 1 else 2)
        head_rows = head_rows + stepped.head_rows
        watch.show(z, leg.s, stepped.probs)
    ready = torch.ones_like(z, dtype=torch.bool) if free is None else free
    ends = find_ends(z, ready, stop_ids, row_lengths(z, padding))
    return Sample(z, nfe.cpu(), int(head_rows), watch.trajectory(process.special_ids), ends.cpu())


def _with_given(
    denoiser: Denoiser,
    z: Tensor,
    given: Tensor | None,
    frozen: Tensor | None,
    padding: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The state with what is given in it, where it may change (None: anywhere), and the padding."""
    if frozen is None and given is None and padding is None:
        return z, None, None
    if frozen is None or given is None or not given.shape == frozen.shape == z.shape:
        raise UserError(f"given and frozen go together, both of shape {tuple(z.shape)}")
    frozen = frozen.to(z.device)
    if padding is not None:
        padding = padding.to(z.device)
        check_padding(denoiser, frozen, padding)
    return torch.where(frozen, given.to(z.device), z), ~frozen, padding


def _filter_of(config: SamplerConfig, leg: Leg) -> Filter | None:
    """What reshapes a step's predictions; None where they stay as they are."""
    argmax = leg.last and config.last == "argmax"
    shape = replace(config.filter, temperature=0.0) if argmax else config.filter
    return None if shape == Filter() else shape


def _checked_labels(label: Tensor, batch: int, n_classes: int) -> Tensor:
    if label.shape != (batch,):
        raise UserError(f"label must have shape ({batch},), got {tuple(label.shape)}")
    if not n_classes:
        raise UserError("this model was built without classes")
    outside = label[(label >= n_classes) | (label < -1)]
    if len(outside):
        raise UserError(
            f"labels must lie in 0..{n_classes - 1}, got {int(outside[0])}; -1 stands for none"
        )
    return label


def _thinned_step(
    run: Run, leg: Leg, z: Tensor, uniforms: StepUniforms, reshape: Filter | None
) -> Stepped:
    """The model where it is needed, and nowhere else."""
    process, length = run.process, z.shape[1]
    plan = plan_step(process, leg.at_s, leg.at_t, z, uniforms.branch, run.free)
    evaluated, active = _evaluated(run, leg, plan.needs_head)
    scale = run.guidance.at(leg.t)
    as_it_is = reshape is None and scale == 1
    seen = run.seen if as_it_is else None
    counted = as_it_is and can_settle(run)
    needed = [plan.needs_head] if counted or seen is None else [plan.surely, plan.perhaps]
    picked = [PickedRows(rows[active]) for rows in needed]
    probs = _no_probs(z) if run.record else None
    if evaluated is None:
        evaluated = torch.ones_like(z[:, 0], dtype=torch.bool)
    elif isinstance(active, Tensor) and not len(active):
        nothing = torch.empty(0, dtype=torch.int64, device=z.device)
        rows: tuple[Tensor, ...] = (nothing, nothing)
        z = apply_plan(process, leg.at_s, z, plan, uniforms.noise, rows, nothing, nothing)
        return Stepped(z, evaluated, 0, probs)
    wanted = torch.where(plan.from_model, uniforms.token, -1.0)
    states = _hidden(run, leg, z, active, guided=scale != 1)
    look = Look(run.head, active, *states, scale, z, wanted, reshape, weigh_drawn=run.record)
    if counted and can_settle(run, states[0]):
        z, n_rows = settle(run, leg, look, plan, uniforms, picked[0])
        return Stepped(z, evaluated, n_rows, probs)
    if counted or seen is None:
        looked = look.through(*picked[0].order())
    else:
        odds = odds_at(leg.at_t, plan.in_doubt, uniforms.accept)
        doubts = look.split(seen, *picked[1].order(), odds)
        looked = look.through(*picked[0].order()).and_also(doubts.resolve())
    rows = (looked.at // length, looked.at % length)
    noisy = is_noise(leg.at_t.index(rows[0]), looked.p_z, z[rows], uniforms.accept[rows])
    if probs is not None and looked.p_drawn is not None:
        written = noisy & plan.from_model[rows]
        probs[rows] = torch.where(written, looked.p_drawn.float(), torch.nan)
    z = apply_plan(process, leg.at_s, z, plan, uniforms.noise, rows, noisy, looked.drawn)
    return Stepped(z, evaluated, len(looked.at), probs)


def _no_probs(z: Tensor) -> Tensor:
    return torch.full(z.shape, torch.nan, dtype=torch.float32, device=z.device)


def _evaluated(run: Run, leg: Leg, needs_head: Tensor) -> tuple[Tensor | None, Tensor | slice]:
    """Which sequences go through the trunk, as a mask (None: all) and as an index.

    On a GPU all of them do if more than a quarter is needed. Where that is all but sure, nothing is
    counted, since the device would have to wait for the host. Otherwise the sequences are filled up with
    others to a quarter, an eighth or a sixteenth of the batch: attention prepares for every size that is
    new to it, and sizes that come again are replayed.
    """
    everyone = None, slice(None)
    if not _on_gpu(needs_head):
        mask = needs_head.any(1)
        return mask, mask.nonzero()[:, 0]
    if mostly_over_a_quarter(len(needs_head), leg.gain * run.n_free):
        return everyone
    mask = needs_head.any(1)
    order, count = ordered_rows(mask)
    size = part_of(len(mask), int(count))
    return everyone if size is None else (mask, order[:size])


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def mostly_over_a_quarter(whole: int, draws: float) -> bool:
    """Whether it is all but sure that of `whole` sequences, each of which expects `draws` draws, more than
    a quarter has one. A sequence has none with a probability of at most e^-draws, independently of others,
    so the chance that no more than the share a has one is at most exp(-whole KL(a || 1 - e^-draws))
    (Chernoff).
    """
    share, busy = (whole // 4) / max(whole, 1), -math.expm1(-draws)
    if busy <= share:
        return False
    divergence = (1 - share) * (math.log1p(-share) + draws)
    if share:
        divergence += share * math.log(share / busy)
    return whole * divergence > _SURE


def part_of(whole: int, count: int) -> int | None:
    """The smallest of a quarter, an eighth and a sixteenth of a whole that holds `count`, 0 for none; None
    where there are more than a quarter."""
    parts = [whole // 16, whole // 8, whole // 4]
    return next((part for part in parts if part >= count), None) if count else 0


def _hidden(
    run: Run, leg: Leg, z: Tensor, active: Tensor | slice, *, guided: bool
) -> tuple[Tensor, Tensor | None]:
    """Hidden states of all positions, and under guidance those without labels by the same pass; [R, d]."""
    z, label = z[active], None if run.label is None else run.label[active]
    padding = None if run.padding is None else run.padding[active]
    if guided:
        assert label is not None
        z, label = torch.cat([z, z]), torch.cat([label, torch.full_like(label, -1)])
        padding = None if padding is None else torch.cat([padding, padding])
    t = torch.full(z.shape[:1], leg.t, device=z.device)
    hidden = run_trunk(run.denoiser, z, t, label, padding)
    hidden = hidden.flatten(0, 1).contiguous()  # as kernels read states
    if not guided:
        return hidden, None
    labelled, unlabelled = hidden.chunk(2)
    return labelled, unlabelled


#: One step of a sampler, by name.
STEPS: dict[str, Callable[[Run, Leg, Tensor, StepUniforms, Filter | None], Stepped]] = {
    THINNED: _thinned_step,
    "dense": step_densely,
    GUMBEL: step_by_gumbel_noise,
    STARVED: step_starved,
}
