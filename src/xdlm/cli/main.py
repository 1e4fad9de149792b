"""`xdlm VERB ...`: finds the verb, turns errors into one line and an exit code."""

from __future__ import annotations

import io
import os
import sys
import warnings
from importlib import import_module

from xdlm import __version__
from xdlm.errors import UserError, did_you_mean

#: Verb -> what it does. Each is a module of this package with a function `run(arguments)`.
VERBS = {
    "demo": "a tour of about two minutes: samples, infilling, perplexity, training",
    "sample": "generate text, fill in templates, show or save trajectories",
    "paint": "generate images, and show each step",
    "view": "look at a recorded trajectory in the terminal, step by step",
    "chat": "take turns writing with a model, and watch each answer take shape",
    "serve": "answer requests over HTTP: completions, infilling, scoring",
    "train": "train a model from a recipe",
    "eval": "measure a model: perplexity, quality of its text",
    "report": "make tables and figures from results",
    "tokenizer": "make a tokenizer from text",
    "codec": "make a codec from images: images to codes and back",
    "prepare": "tokenise text, or encode images, into shards on disk",
    "import": "convert a model published by others: LLaDA, transformers, MDLM, UDLM, GIDD, XDLM, LlamaGen",
    "export": "write a model's weights alone, in a chosen precision",
    "bench": "measure speed and memory beside a plain implementation",
    "doctor": "check what is installed and whether it works",
}

_USAGE = f"""usage: xdlm VERB [options]

Discrete diffusion language models: masked, uniform, mixed and time-varying noise.

verbs:
{chr(10).join(f"  {verb:<10} {what}" for verb, what in VERBS.items())}

`xdlm VERB --help` lists a verb's options, with examples.
"""


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 2 bad input, 130 interrupted, 143 training ended by SIGTERM."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an odd locale costs a character, not the run
            stream.reconfigure(errors="replace")
    if arguments[:1] == ["help"]:  # `xdlm help sample` is `xdlm sample --help`
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return
    if arguments[0] == "--version":
        print(f"xdlm {__version__}")
        return
    verb, rest = arguments[0], arguments[1:]
    usual, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        if verb not in VERBS:
            if verb.startswith("-"):
                raise UserError(f"options come after a verb, got '{verb}' first; see xdlm --help")
            raise UserError(f"unknown verb '{verb}'{did_you_mean(verb, VERBS)}")
        import_module(f"xdlm.cli.{verb}").run(rest)
        sys.stdout.flush()
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        print(f"xdlm{'' if rank == '0' else f' (process {rank})'}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("xdlm: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"xdlm: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        print("xdlm: not enough memory for that; ask for less at a time", file=sys.stderr)
        sys.exit(2)
    finally:
        warnings.formatwarning = usual


def _one_line(
    message: Warning | str, category: object, filename: object, lineno: object, line: object = None
) -> str:
    """A warning for people: what it says, not the place in the code."""
    return f"xdlm: {' '.join(str(message).split())}\n"


def _is_out_of_memory(error: BaseException) -> bool:
    """torch says it in more than one way."""
    return isinstance(error, MemoryError) or any(
        phrase in str(error).lower() for phrase in ("out of memory", "can't allocate memory")
    )


if __name__ == "__main__":
    main()
