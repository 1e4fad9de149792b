"""Write the cards of the bundled models, and their table in the README, from what was measured of them.

Usage::

    xdlm eval ppl --model pocket-xdlm --draws 2 --row-nats --records results/pocket.jsonl
    xdlm eval gen --model pocket-xdlm --judge pocket-judge models/SmolLM2-135M-Instruct \\
        --steps 4 8 16 64 --n 256 256 256 512 --records results/pocket.jsonl
    xz -9e results/pocket.jsonl
    python tools/model_cards.py

The same for the other three (the judge has a perplexity alone). Every figure on a card is of a record, of
the weights' own configuration, or of results/pocket-seconds.csv: what training took, as run,seconds.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import safe_open

from xdlm.api import load
from xdlm.bundled import bundled_folder
from xdlm.evaluation.records import EvalRecord, read_records
from xdlm.report.tables import markdown_table, with_error

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "pocket.jsonl.xz"
TIMES = ROOT / "results" / "pocket-seconds.csv"
README = ROOT / "README.md"
KINDS = {
    "mdlm": "a masked diffusion language model (MDLM)",
    "xdlm": "a diffusion language model of mixed noise (XDLM, k = 0.1), the default of the package",
    "udlm": "a uniform diffusion language model (UDLM)",
    "judge": "an autoregressive language model that judges what the other three write",
}
#: How the README calls them, and the judges.
TITLES = {
    "mdlm": "`pocket-mdlm`",
    "xdlm": "`pocket-xdlm` (`pocket`), k = 0.1",
    "udlm": "`pocket-udlm`",
    "judge": "`pocket-judge` (autoregressive, exact)",
}
JUDGES = {"pocket-judge": "`pocket-judge`", "SmolLM2-135M-Instruct": "SmolLM2-135M"}
#: What weights are stored as, by the names that safetensors has for it.
STORED = {
    "BF16": "in bfloat16",
    "I8": "as bytes (int8, with a multiplier for each row; `xdlm export` writes them as floats for others)",
}
OPTIMISERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}
_TABLE = re.compile(r"\| +\| perplexity of held-out text .*?\n(?=\n)", re.DOTALL)


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
        f"DiT, {config.model.depth} x {config.model.width}, {parameters / 1e6:.2f} M parameters "
        f"{_stored(name)}, {model.tokenizer.size:,} byte-level BPE tokens, rows of {config.data.length} "
        "tokens.",
        "",
        "## Data",
        "",
        "96 English novels from before 1929, in the public domain in the United States: 72.3 M characters, "
        "22.6 M tokens, cleaned by `tools/build_corpus.py --all` ([where they are from]"
        "(../../data/corpus/README.md)). The last 4% of 29 of them are held out (`corpus:heldout`); "
        "paragraphs of those do not occur in training. The collection names no edition for most texts.",
        "",
        "## Training",
        "",
        f"`xdlm train recipes/pocket/{kind}.yaml`: {model.step:,} steps of {config.train.batch} rows, "
        f"{tokens / 1e6:,.0f} M tokens ({tokens / 22.56e6:.0f} passes), {OPTIMISERS[config.optim.kind]}, "
        f"averaged weights. One NVIDIA H200, all four models at once, beside other training, in "
        f"{training_seconds():.0f} seconds.",
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


def _stored(name: str) -> str:
    folder = bundled_folder(name)
    assert folder is not None
    with safe_open(folder / "model.safetensors", "pt") as weights:
        return STORED[weights.get_slice("embed.weight").get_dtype()]


def training_seconds() -> float:
    """Until the last of them was done: they were trained at the same time."""
    with TIMES.open(encoding="utf-8", newline="") as lines:
        return max(float(seconds) for _, seconds in csv.reader(lines))


def readme_table(records: Sequence[EvalRecord]) -> str:
    """All four side by side: perplexity of held-out text, and of generated text under each judge."""
    steps = sorted({r.steps for r in records if r.metric == "gen_ppl" and r.steps is not None})
    rows = []
    for kind, title in TITLES.items():
        own = [r for r in records if r.model == f"pocket-{kind}"]
        (ppl,) = (with_error(r.value, r.stderr, 1) for r in own if r.metric == "ppl")
        judged = {
            (r.judge, r.steps): with_error(r.value, r.stderr, 1)
            for r in own
            if r.metric == "gen_ppl"
        }
        if not judged:
            rows.append([title, ppl, "", *[""] * len(steps)])
            continue
        for judge, called in JUDGES.items():
            rows.append([title, ppl, called, *(judged[judge, number] for number in steps)])
            title = ppl = ""
    return markdown_table(
        ["", "perplexity of held-out text", "judge", *(f"{number} steps" for number in steps)], rows
    )


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
    """Write all cards and the README's table."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    records = read_records(RECORDS)
    for kind in KINDS:
        folder = bundled_folder(f"pocket-{kind}")
        assert folder is not None
        (folder / "README.md").write_text(card(kind, records), encoding="utf-8")
    text, n = _TABLE.subn(
        lambda _: readme_table(records) + "\n", README.read_text(encoding="utf-8")
    )
    assert n == 1, "the README has one such table"
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
