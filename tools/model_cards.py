"""Write the model cards of the bundled models from what was measured of them.

Usage::

    xdlm eval ppl --model pocket-xdlm --draws 2 --row-nats --records results/pocket.jsonl
    xdlm eval gen --model pocket-xdlm --judge pocket-judge models/SmolLM2-135M-Instruct \\
        --steps 4 8 16 64 --n 256 256 256 128 --records results/pocket.jsonl
    python tools/model_cards.py

The same for the other three (the judge has a perplexity alone). Every figure on a card is of a record.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from xdlm.api import load
from xdlm.evaluation.records import EvalRecord, read_records
from xdlm.report.tables import markdown_table, with_error

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "pocket.jsonl"
BUNDLED = ROOT / "src" / "xdlm" / "bundled"
KINDS = {
    "mdlm": "a masked diffusion language model (MDLM)",
    "xdlm": "a diffusion language model of mixed noise (XDLM, k = 0.1), the default of the package",
    "udlm": "a uniform diffusion language model (UDLM)",
    "judge": "an autoregressive language model that judges what the other three write",
}


def card(kind: str, records: Sequence[EvalRecord]) -> str:
    """The page of one model."""
    name = f"pocket-{kind}"
    model = load(name, device="cpu")
    config = model.config
    parameters = sum(p.numel() for p in model.denoiser.parameters())
    tokens = config.train.batch * config.data.length * model.step
    parts = [
        "---",
        "license: apache-2.0",
        "language: en",
        "library_name: xdlm",
        "pipeline_tag: text-generation",
        "---",
        f"# {name}",
        "",
        f"{KINDS[kind][0].upper()}{KINDS[kind][1:]}. One of four models that ship with `xdlm`, alike in "
        "size, text and training, so that the kinds of noise can be compared on a laptop.",
        "",
        "## Model",
        "",
        f"DiT, {config.model.depth} x {config.model.width}, {parameters / 1e6:.2f} M parameters in "
        f"bfloat16, {model.tokenizer.size:,} byte-level BPE tokens, rows of {config.data.length} tokens.",
        "",
        "## Data",
        "",
        "96 English novels from before 1929, in the public domain in the United States: 72.3 M characters, "
        "22.6 M tokens, cleaned by `tools/build_corpus.py --all`. The last 4% of 29 of them are held out "
        "(`corpus:heldout`); paragraphs of those do not occur in training. The collection names no edition "
        "for most texts.",
        "",
        "## Training",
        "",
        f"`xdlm train recipes/pocket/{kind}.yaml`: {model.step:,} steps of {config.train.batch} rows, "
        f"{tokens / 1e6:,.0f} M tokens ({tokens / 22.56e6:.0f} passes), AdamW, averaged weights. One "
        "NVIDIA H200, all four models at once in 422 seconds.",
        "",
        "## Measured",
        "",
        *_measured(name, records),
        "",
        "## Use and limits",
        "",
        *_use(kind),
        "The prose is that of its novels: old spellings, old manners, and their prejudices. It knows no "
        "facts, follows no instructions and was not made safe in any way. It is there to try the library.",
        "",
        "Licence of the weights: that of the package (Apache-2.0).",
        "",
    ]
    return "\n".join(parts)


def _measured(name: str, records: Sequence[EvalRecord]) -> list[str]:
    own = [r for r in records if r.model == name]
    (ppl,) = (r for r in own if r.metric == "ppl")
    bits = ppl.details["bits_per_character"]
    what = "exact" if ppl.config["process"]["kind"] == "autoregressive" else "upper bound"
    lines = [
        f"Perplexity of held-out text ({what}): **{with_error(ppl.value, ppl.stderr)}** per token, "
        f"{bits:.3f} bits per character ({ppl.details['tokens']:,.0f} tokens, {ppl.draws} draws, seed "
        f"{ppl.seed}, {ppl.device}, {ppl.dtype}, commit {ppl.commit}).",
    ]
    judged = {(r.steps, r.judge): r for r in own if r.metric == "gen_ppl"}
    if not judged:
        return lines
    judges = sorted({str(r.judge) for r in judged.values()}, reverse=True)
    entropy = {r.steps: r for r in own if r.metric == "entropy"}
    rows = [
        [f"{steps}", f"{one.n}", f"{judged[steps, judges[0]].nfe:.0f}",
         *(with_error(judged[steps, judge].value, judged[steps, judge].stderr, 1) for judge in judges),
         with_error(one.value, one.stderr, 3)]
        for steps, one in entropy.items()
    ]  # fmt: skip
    real = {r.judge: with_error(r.value, r.stderr, 1) for r in own if r.metric == "real_ppl"}
    columns = [
        "steps",
        "texts",
        "forward passes",
        *(f"perplexity, {j}" for j in judges),
        "entropy, nats",
    ]
    return [
        *lines,
        "",
        f"Generated text under {len(judges)} judges (seed {one_seed(judged.values())}; real text: "
        f"{', '.join(f'{real[judge]} for {judge}' for judge in judges)}):",
        "",
        markdown_table(columns, rows),
    ]


def one_seed(records: Iterable[EvalRecord]) -> int:
    (seed,) = {record.seed for record in records}
    return seed


def _use(kind: str) -> list[str]:
    if kind == "judge":
        return ["`xdlm eval gen --judge pocket-judge`. It writes nothing.", ""]
    return [f'`xdlm sample --model pocket-{kind}`, or `load("pocket-{kind}")` in Python.', ""]


def main() -> None:
    """Write all cards."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=BUNDLED, help="folder of the models' folders")
    out = parser.parse_args().out
    records = read_records(RECORDS)
    for kind in KINDS:
        folder = out / f"pocket-{kind}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "README.md").write_text(card(kind, records), encoding="utf-8")


if __name__ == "__main__":
    main()
