"""`xdlm eval MEASURE`: finds the measure."""

from __future__ import annotations

import sys
from importlib import import_module

from xdlm.errors import UserError, did_you_mean

#: Measure -> what it tells. Each is a module of `xdlm.cli.measures` with a function `run(arguments)`.
MEASURES = {
    "ppl": "how well a model predicts text: perplexity",
    "gen": "how well it writes: quality of generated text under a judge",
    "llm": "how well it answers: benchmarks of large models, programs in a sandbox",
    "draws": "how faithfully a sampler draws: texts of a known law",
    "image": "how well it paints: FID, KID, precision and recall of generated images",
    "dynamics": "perplexity and quality, at every checkpoint of training runs",
}

_USAGE = f"""usage: xdlm eval MEASURE [options]

measures:
{chr(10).join(f"  {name:<10} {what}" for name, what in MEASURES.items())}

examples:
  xdlm eval ppl --max-rows 16
  xdlm eval gen --steps 4 16 --n 8 --records results.jsonl
  xdlm eval llm --tasks gsm8k --steps 8 --limit 2
  xdlm eval draws --steps 8 64 --length 128 --tokens 5000
  xdlm eval image --model runs/cpu-pixels --n 64 --steps 8
  xdlm eval dynamics runs/cpu-tiny --records dynamics.jsonl

`xdlm eval MEASURE --help` lists a measure's options.
"""


def run(arguments: list[str]) -> None:
    if {"-h", "--help"} & set(arguments[:1]):
        print(_USAGE, end="")
        sys.exit(0)
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"which measure? one of {', '.join(MEASURES)}; for example: xdlm eval ppl")
    if arguments[0] not in MEASURES:
        raise UserError(f"unknown measure '{arguments[0]}'{did_you_mean(arguments[0], MEASURES)}")
    import_module(f"xdlm.cli.measures.{arguments[0]}").run(arguments[1:])
