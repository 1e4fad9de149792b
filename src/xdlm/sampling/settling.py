"""A reverse step's rows on a GPU that counts by itself which of them need the head.

It would stand still while the host learns how many they are and launches what follows. All rows that may
need the head are told apart, gathered, taken through it and carried out by a kernel each.
"""

from __future__ import annotations

from torch import Tensor

from xdlm.ops.gather import PickedRows, ordered_rows
from xdlm.ops.head import DrawingHead
from xdlm.sampling.looking import Look
from xdlm.sampling.reverse import Leg, Run
from xdlm.sampling.seen import ROUNDING, odds_at
from xdlm.sampling.step import Plan, StepUniforms, apply_noise


def can_settle(run: Run) -> bool:
    """Whether there are kernels for it; and for tokens in doubt, what the head found there before. A run
    that is recorded needs the probabilities of what is drawn as well."""
    has_memory = run.seen is not None or not run.process.has_uniform_noise
    return isinstance(run.head, DrawingHead) and run.head.counts and has_memory and not run.record


def settle(
    run: Run, leg: Leg, look: Look, plan: Plan, uniforms: StepUniforms, picked: PickedRows
) -> tuple[Tensor, Tensor | int]:
    """The next state, and how many rows went through the head; `picked` are those that may need it."""
    from xdlm.ops.fused_seen import Memory, fused_settle, fused_take

    other, fresh = apply_noise(run.process, leg.at_s, look.z, plan, uniforms.noise)
    order, n = picked.order()
    if not n:
        return fresh, 0
    order = order[:n]
    at, which, count = look.places(order), None, picked.count
    odds, doubts, before = None, None, None
    if run.seen is not None:
        odds = odds_at(leg.at_t, plan.in_doubt, uniforms.accept)
        doubtful, doubts = run.seen.doubtful(at, look.hidden, order, look.z.flatten(), odds)
        which, count = ordered_rows(doubtful)
        before = Memory(run.seen.hidden, run.seen.log_total)
    assert isinstance(run.head, DrawingHead)
    taken = fused_take(
        look.hidden, order, at, which, count, look.wanted.flatten(), doubts, ROUNDING
    )
    drawn, p_z = run.head.draw_counted(taken, count)
    fused_settle(taken, count, drawn, p_z, odds, other.flatten(), fresh.view(-1), before)
    return fresh, count
