"""The Triton kernels compiled for a GPU, which takes none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

#: Every kernel with the types and constants of a call at the paper's size.
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from xdlm.objective import fused_rates
from xdlm.ops import fused, fused_counter, fused_draw, fused_mlp, fused_noise, fused_norm, fused_rotary
from xdlm.ops import fused_group_norm as group_norm
from xdlm.ops import fused_logistic, fused_order, fused_product, fused_seen, fused_sums

REAL = dict.fromkeys("mean rstd sums cos sin total spread logits".split(), "*fp32")
HEAD = REAL | dict.fromkeys("lse logit_x logit_z log_c d_lse d_x d_z d_total uniform p_z".split(),
                            "*fp64") | dict(bias="*fp32", x="*i64", z="*i64", drawn="*i64",
                                        count="*i64", top="*fp32", mass="*fp32")
SEEN = dict.fromkeys("rows at which count z out_at drawn other".split(), "*i64") | dict.fromkeys(
    "uniform out_uniform p_z accept alpha b".split(), "*fp64") | dict.fromkeys(
    "log_total radius bar out_bar logit out_logit".split(), "*fp32") | dict(
    doubtful="*i1", in_doubt="*i1", slack="fp32")
TILES = dict(hidden="tensordesc<bf16[128, 64]>", weight="tensordesc<bf16[256, 64]>",
             out="tensordesc<fp32[128, 64]>")
RATES = dict.fromkeys("lse logit_x logit_z alpha b b_z weight loss d_lse d_x d_z d_total".split(),
                      "*fp64") | dict(total="*fp32", x="*i64", z="*i64")
NOISE = dict.fromkeys("alpha b b_special rate rate_special weight scale".split(), "*fp64") | dict(
    x="*i64", index="*i64", z="*i64", picked="*i1", key0="i64", key1="i64")
NORM = REAL | dict(seed="*i32", factor="fp32")
WIDE = dict.fromkeys("h value bias gate weight scale shift after y d_y d_after d_h d_value".split(),
                     "*fp32")
GROUP = REAL | dict.fromkeys("sum by_normed channel_mean group_mean mean_d mean_by_normed d_bias "
                             "d_weight".split(), "*fp32")
LAW = REAL | dict.fromkeys("hidden logit_x logit_z d_x d_z d_total d_hidden".split(), "*fp32") | dict(
    x="*i64", z="*i64", log_c="*fp64")
GUIDED = dict(hidden="*fp32", unlabelled="*fp32", uniform="*fp64", z="*i64", drawn="*i64", p_z="*fp64",
              scale="fp32")
LEVELS = dict(LEVELS=256, SHIFT=2.0, LOWEST=-7.0, HIGHEST=7.0, BLOCK=256, ROWS=4, HAS_SUM=True)
TILE = dict(C=192, PER_GROUP=6, TILE=64, ACROSS=64)
WHOLE = dict(C=192, PER_GROUP=6, TILE=64, DOWN=16, WIDE=8)
SIZES = dict(W=768, BLOCK=1024, HAS_BRANCH=True, HAS_BIAS=True, DROPOUT=True)
for kernel, types, constants in [
    (fused._stats_kernel, HEAD, dict(width=50304, TILES=256, HAS_SUM=True, NEED_SPREAD=True,
                                     BLOCK=512)),
    (fused._gradient_kernel, HEAD, dict(width=50304, HAS_SUM=True, FOR_BIAS=True, ROWS=32, BLOCK=2048)),
    (fused_draw._draw_kernel, HEAD | dict(source="*fp32"),
     dict(WIDTH=50304, TILES=256, TOKENS=256, FEATURES=64, STORED=True, IN_DOUBT=False)),
    (fused_draw._draw_kernel, HEAD | dict(bar="*fp32", logit="*fp32"),
     dict(WIDTH=768, TILES=1024, TOKENS=64, FEATURES=64, STORED=False, IN_DOUBT=True)),
    (fused_draw._draw_kernel, HEAD | dict(bar="*fp32", logit="*fp32"),
     dict(WIDTH=768, TILES=1024, TOKENS=64, FEATURES=64, STORED=False, IN_DOUBT=False)),
    (fused_sums._finish_kernel, HEAD, dict(TOKENS=256, TILES=8)),
    (fused_product._product_kernel, HEAD | TILES,
     dict(WIDTH=768, STORED=True, COUNTED=False, ROWS=128, TOKENS=256, PARTS=1, FEATURES=64)),
    (fused_product._product_kernel, HEAD | TILES,
     dict(WIDTH=768, STORED=False, COUNTED=True, ROWS=128, TOKENS=256, PARTS=4, FEATURES=64)),
    (fused_seen._doubt_kernel, SEEN, dict(HAS_BIAS=True, WIDTH=768, SPAN=1024)),
    (fused_seen._doubt_kernel, SEEN, dict(HAS_BIAS=False, WIDTH=768, SPAN=1024)),
    (fused_seen._take_kernel, SEEN, dict(CHOSEN=True, IN_DOUBT=True, WIDTH=768, SPAN=1024)),
    (fused_seen._take_kernel, SEEN, dict(CHOSEN=False, IN_DOUBT=False, WIDTH=768, SPAN=1024)),
    (fused_seen._settle_kernel, SEEN, dict(IN_DOUBT=True, WIDTH=768, SPAN=1024)),
    (fused_seen._settle_kernel, SEEN, dict(IN_DOUBT=False, WIDTH=768, SPAN=1024)),
    (fused_order._count_kernel, dict(mask="*i1", counts="*i32"), dict(CHUNK=4096)),
    (fused_order._place_kernel, dict(mask="*i1", counts="*i32", order="*i64", count="*i64"),
     dict(CHUNKS=8, CHUNK=4096)),
    (fused_rates._nelbo_kernel, RATES, dict(BLOCK=128)),
    (fused_noise._noise_kernel, NOISE, dict(CORRUPT=1, THINNING=8, SPECIAL=(9, 4), RISING=(4, 9),
                                            N_SPECIAL=2, KEPT=0.02, BLOCK=256)),
    (fused_counter._uniform_kernel, dict(sample="*i64", position="*i64", out="*fp64"),
     dict(BLOCK=1024)),
    (fused_norm._forward_kernel, NORM, SIZES | dict(KEEP_MOMENTS=True, EPS=1e-5)),
    (fused_norm._backward_kernel, NORM, SIZES | dict(HAS_AFTER=True)),
    (fused_norm._finish_kernel, NORM, dict(W=768, HAS_BRANCH=True, ROWS=64, COLUMNS=16)),
    (fused_rotary._turn_kernel, REAL, dict(HEADS=12, HALF=32, SIGN=-1.0, COPY_V=True, BLOCK_H=16,
                                           BLOCK_D=32)),
    (fused_mlp._gelu_kernel, REAL, dict(ROWS=2, COLUMNS=1024)),
    (fused_mlp._gelu_backward_kernel, REAL, dict(ROWS=2, COLUMNS=1024, CHUNK=32)),
    (fused_logistic._stats_kernel, LAW, LEVELS),
    (fused_logistic._gradient_kernel, LAW, LEVELS),
    (fused_logistic._guided_kernel, GUIDED, {n: v for n, v in LEVELS.items() if n != "HAS_SUM"}),
    (group_norm._moments_kernel, GROUP, TILE | dict(HAS_SHIFT=True)),
    (group_norm._group_kernel, GROUP, WHOLE | dict(EPS=1e-5)),
    (group_norm._apply_kernel, GROUP, TILE | dict(HAS_SHIFT=True, SWISH=True)),
    (group_norm._sums_kernel, GROUP, TILE | dict(HAS_SHIFT=True, SWISH=True)),
    (group_norm._group_backward_kernel, GROUP, WHOLE | dict(HAS_SHIFT=True)),
    (group_norm._backward_kernel, GROUP, TILE | dict(HAS_SHIFT=False, SWISH=False)),
    (fused_norm._forward_kernel, NORM | WIDE, SIZES | dict(KEEP_MOMENTS=False, EPS=1e-5)),
    (fused_norm._backward_kernel, NORM | WIDE, SIZES | dict(HAS_AFTER=False)),
]:
    signature = {
        name: "constexpr" if name in constants
        else types.get(name.removesuffix("_ptr"), "*bf16" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    given = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    is_product = kernel is fused_product._product_kernel
    options = dict(num_warps=8, num_stages=fused_product._STAGES) if is_product else {}
    made = triton.compile(ASTSource(kernel, signature, given), target=GPUTarget("cuda", 90, 32),
                          options=options)
    # What a program on Hopper can have, and what the kernel says that it needs.
    assert not is_product or made.metadata.shared <= fused_product._SHARED <= 232_448
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter accepts more than the compiler does, which needs no GPU either."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]
