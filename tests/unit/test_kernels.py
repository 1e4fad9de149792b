"""The Triton kernels without a GPU: Triton's interpreter runs them on the CPU, at small sizes.

It runs in a process of its own, since it must be switched on before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import torch
from test_ops import head_inputs, loss_and_grads
from xdlm import Vocab
from xdlm.noise import Mixed
from xdlm.objective import elbo_weight, row_log_c, row_losses
from xdlm.objective.fused_rates import fused_row_losses
from xdlm.ops import Stream, draw_and_weigh, rows, uniform
from xdlm.ops.fused import TritonBlock
from xdlm.ops.fused_counter import fused_uniform
from xdlm.ops.head import DrawingHead
from xdlm.structs import HeadRows

rows.fused_obstacle = lambda device: None  # pretend that the kernels can run here
TritonBlock.elements = TritonBlock.gradient_elements = 5 * 5000
for vocab, mask_id, bias, k in [(513, 256, True, 0.1), (5000, 0, False, 0.1), (4097, 4096, True, 0.0)]:
    process = Mixed(Vocab(vocab, mask_id), k=k)
    hidden, weight, offset, x, z = head_inputs(13, 8, vocab, mask_id, torch.float32, bias=bias)
    z = torch.where(z == mask_id, z, x) if k == 0 else z
    expected = loss_and_grads("eager", hidden, weight, offset, x, z, process, 0.4)
    computed = loss_and_grads("fused", hidden, weight, offset, x, z, process, 0.4)
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-5)
    coefs = process.coefs(torch.full(x.shape, 0.4, dtype=torch.float64))
    weights = elbo_weight(coefs, x, z)
    for losses in (row_losses(coefs, x, z, weights), fused_row_losses(coefs, x, z, weights)):
        total = rows.row_loss(HeadRows(hidden, weight, offset, x, z, row_log_c(process, coefs, x)),
                              losses, mask_id=process.special_ids, impl="fused")
        torch.testing.assert_close(total.float(), expected[4].float(), rtol=1e-5, atol=1e-5)
        leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
        for ours, theirs in zip(torch.autograd.grad(total, leaves), expected[5:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-5)
    u = torch.rand(13, dtype=torch.float64)
    u[0], u[1] = 0.0, 1 - 2.0**-53
    with torch.no_grad():
        drawn, p_x = DrawingHead(weight, offset, process.special_ids).draw(hidden, u, x)
        logits = rows.head_logits(hidden, weight, offset, process.special_ids)
    twin, p_twin = draw_and_weigh(logits, u, x)
    assert torch.equal(drawn, twin)
    torch.testing.assert_close(p_x, p_twin, rtol=1e-5, atol=0)
# Views that a kernel must not take for plain arrays: one row of log c for all, every other token, and
# an upstream gradient that is one number expanded.
process = Mixed(Vocab(513, 256), k=0.1)
hidden, weight, offset, x, z = head_inputs(12, 8, 513, 256, torch.float32)
twice = lambda v: torch.stack([v, v], 1).flatten()[::2]
coefs = process.coefs(torch.tensor([0.4]))
for impl in ("eager", "fused"):
    stats = rows.row_stats(hidden[None], weight, offset, twice(x)[None], twice(z)[None],
                           row_log_c(process, coefs, x[None]), mask_id=256, impl=impl)
    found = [stats.S[0], stats.logit_x[0], *torch.autograd.grad(stats.lse.sum(), (hidden, weight))]
    if impl == "eager":
        expected = found
for ours, theirs in zip(found, expected, strict=True):
    torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-5)
sample, position = torch.arange(9)[:, None] + (1 << 33), torch.arange(70)[None]
for one, other in [(sample, position), (sample[:, 0], sample[:, 0] % 7), (sample[0, 0], position[0, 3]),
                   (position.expand(9, 70).T, sample.T % 5 + position.T), (sample[:, :, None], position)]:
    here = uniform(2**40 + 5, Stream.NOISE, one, other, 7)
    assert torch.equal(here, fused_uniform(2**40 + 5, int(Stream.NOISE), one, other, 7))
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_equal_their_twins_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
