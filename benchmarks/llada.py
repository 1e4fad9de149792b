"""LLaDA-8B with random weights on one GPU: time and peak memory, beside the straightforward way.

    python benchmarks/llada.py --out benchmarks/h200/llada.jsonl
    python benchmarks/llada.py --small            the same at a toy size, on a CPU too

Forward and a training step of LoRA adapters (every linear layer, blocks recomputed in the backward pass)
at length 4,096, and 256 tokens behind a prompt of 128 in 32 steps of Algorithm 1. `trunk` is the training
step with no head and no loss: what `ours` takes beyond it is the loss's. `plain` is the same trunk with all
logits in float32, dense laws over the vocabulary, and float64 Gumbel noise on every logit. Times are means
of --repeats runs after one that is not counted; memory is the peak that was allocated, weights included.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

from xdlm.config import LoraConfig
from xdlm.evaluation.plain import plain_decode, plain_loss
from xdlm.evaluation.provenance import commit
from xdlm.files import write_atomic
from xdlm.models import run_trunk
from xdlm.models.llada import Llada, LladaConfig
from xdlm.noise import Mixed
from xdlm.sampling import ConfidenceConfig, decode
from xdlm.structs import Batch
from xdlm.training.adapters import add_adapters, trained_parameters
from xdlm.training.blocks import checkpoint_blocks
from xdlm.training.device import describe, pick_device
from xdlm.training.loss import DiffusionLoss

SMALL = LladaConfig(depth=2, width=64, heads=4, mlp_width=128, vocab_size=2_000, mask_id=1_000)
K, STEPS, PROMPT, NEW = 0.1, 32, 128, 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a toy size")
    parser.add_argument("--length", type=int, default=4096, help="of the row that is trained on")
    parser.add_argument("--rank", type=int, default=64, help="of the adapters")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 8], help="texts written at a time"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="append the figures to this file")
    options = parser.parse_args()
    bench = Bench(options)
    bench.run()
    if options.out is not None:
        old = options.out.read_text() if options.out.exists() else ""
        write_atomic(options.out, old + "".join(json.dumps(row) + "\n" for row in bench.rows))


class Bench:
    """A model, and the rows of the table so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = pick_device(options.device)
        self.config = SMALL if options.small else LladaConfig()
        self.process = Mixed(self.config.own_vocab(), k=K)
        self.rows: list[dict[str, object]] = []
        torch.manual_seed(0)
        self.model = self._model()
        self.counter = count()
        self.generator = torch.Generator(self.device).manual_seed(0)

    def _model(self) -> Llada:
        """Where it will run, in bfloat16 from the start: float32 weights would be 32 GB."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                return Llada(self.config, self.config.vocab_size).eval()
        finally:
            torch.set_default_dtype(before)

    def run(self) -> None:
        size = sum(p.numel() for p in self.model.parameters())
        print(f"{describe(self.device)}, torch {torch.__version__}, {size:,} parameters, "
              f"commit {commit()}", flush=True)  # fmt: skip
        self.model.requires_grad_(False)
        for batch in self.options.batches:
            self._compare(f"write {batch} x {NEW} tokens", lambda b=batch: self._write(b),
                          lambda b=batch: self._write_plainly(b))  # fmt: skip
        length = self.options.length
        self._compare(f"forward, 1 x {length}", torch.no_grad()(lambda: self._loss(1.0)),
                      torch.no_grad()(self._plain_loss))  # fmt: skip
        add_adapters(self.model, LoraConfig(rank=self.options.rank, alpha=128.0))
        for adapter in trained_parameters(self.model).values():
            adapter.data = adapter.data.float()
        checkpoint_blocks(self.model)
        self.optimizer = torch.optim.AdamW(trained_parameters(self.model).values(), lr=1e-4)
        name = f"LoRA step, 1 x {length}"
        self._measure(name, "trunk", lambda: self._step(self._trunk_alone))
        self._compare(name, lambda: self._step(lambda: self._loss(0.02)),
                      lambda: self._step(self._plain_loss))  # fmt: skip

    def _compare(self, name: str, ours: Callable[[], object], plain: Callable[[], object]) -> None:
        self._measure(name, "ours", ours)
        self._measure(name, "plain", plain)

    def _measure(self, name: str, impl: str, run: Callable[[], object]) -> None:
        on_gpu = self.device.type == "cuda"
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        run()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(self.options.repeats):
            began = time.perf_counter()
            run()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
        mean, spread = statistics.fmean(seconds), statistics.pstdev(seconds)
        self.rows.append({
            "task": name, "impl": impl, "seconds": round(mean, 5), "spread": round(spread, 5),
            "repeats": len(seconds), "peak_gb": peak and round(peak, 3), "k": K, "steps": STEPS,
            "prompt": PROMPT, "rank": self.options.rank, "device": describe(self.device),
            "torch": torch.__version__, "commit": commit(), "small": self.options.small,
        })  # fmt: skip
        memory = "" if peak is None else f"{peak:8.2f} GB"
        print(
            f"{name:28} {impl:6} {mean * 1e3:10.1f} +- {spread * 1e3:6.1f} ms {memory}", flush=True
        )

    def _tokens(self, *shape: int) -> torch.Tensor:
        """Any but the mask, and those behind it."""
        return torch.randint(0, self.config.mask_id, shape, device=self.device)

    def _write(self, batch: int) -> None:
        given = torch.cat([self._tokens(batch, PROMPT), self._tokens(batch, NEW)], 1)
        frozen = (torch.arange(PROMPT + NEW, device=self.device) < PROMPT).expand(batch, -1)
        config = ConfidenceConfig(steps=STEPS, k=K)
        decode(self.model, self.process, given=given, frozen=frozen, config=config,
               seed=next(self.counter))  # fmt: skip

    def _write_plainly(self, batch: int) -> None:
        plain_decode(self.model, self.process, prompt=self._tokens(batch, PROMPT), n_new=NEW, steps=STEPS,
                     k=K, temperature=1.0, generator=self.generator)  # fmt: skip

    def _loss(self, kept_rows: float) -> torch.Tensor:
        step = next(self.counter)
        batch = Batch(self._tokens(1, self.options.length), torch.tensor([step]))
        loss = DiffusionLoss(self.process, kept_rows=kept_rows)
        return loss(self.model, batch, seed=0, step=step, global_batch=1).loss

    def _plain_loss(self) -> torch.Tensor:
        low, high = self.process.time_range
        t = (
            low
            + (high - low) * torch.rand(1, generator=self.generator, device=self.device).double()
        )
        tokens = self._tokens(1, self.options.length)
        return plain_loss(self.model, self.process, tokens, t, self.generator)

    def _trunk_alone(self) -> torch.Tensor:
        tokens = self._tokens(1, self.options.length)
        return run_trunk(self.model, tokens, torch.zeros(1, device=self.device)).float().sum()

    def _step(self, loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
