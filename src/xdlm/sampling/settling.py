"""A reverse step's rows on a GPU that counts by itself which of them need the head.

How many rows may need it was counted before the trunk began, and the host knows it in time. How many do is
known only behind the trunk, and the GPU would stand still while the host learns it and launches what
follows: that number stays where it is. All rows that may need the head are told apart, gathered, taken
through it and carried out by a kernel each.
"""

from __future__ import annotations

from torch import Tensor

from xdlm.ops.gather import PickedRows, ordered_rows
from xdlm.ops.head import DrawingHead
from xdlm.sampling.looking import Look
from xdlm.sampling.reverse import Leg, Run
from xdlm.sampling.seen import odds_at
from xdlm.sampling.step import Plan, StepUniforms, apply_noise


def can_settle(run: Run, hidden: Tensor | None = None) -> bool:
    """Whether there are kernels for it, and for these states, which should be like the head's weights, but
    need not. A run that is recorded needs the probabilities of what is drawn as well."""
    if not isinstance(run.head, DrawingHead) or run.record:
        return False
    return run.head.can_count(run.head.padded.weight if hidden is None else hidden)


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
    assert isinstance(run.head, DrawingHead) and (doubts or not run.process.has_uniform_noise)
    taken = fused_take(look.hidden, order, at, which, count, look.wanted.flatten(), doubts)
    drawn, p_z = run.head.draw_counted(taken, count)
    fused_settle(taken, count, drawn, p_z, odds, other.flatten(), fresh.view(-1), before)
    return fresh, count
