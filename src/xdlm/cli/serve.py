"""`xdlm serve`: a model behind HTTP."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from xdlm.api import load
from xdlm.cli.options import parse
from xdlm.cli.progress import console, waiting
from xdlm.errors import UserError

if TYPE_CHECKING:
    from xdlm.serve.service import Service

_DESCRIPTION = """Serve models over HTTP: a page to watch them write, OpenAI-style completions, infilling.

Requests that arrive together go through the model together. The same seed and settings give the same text
whatever else is going on. SIGTERM or Ctrl-C finishes what was begun and exits with 0.

  GET  /                 GET  /v1/models        POST /v1/completions   POST /v1/infill
  GET  /healthz          GET  /metrics          POST /v1/trajectory    POST /v1/score
  GET  /openapi.json

examples:
  xdlm serve
  xdlm serve --model pocket-mdlm pocket-xdlm pocket-udlm   # side by side on the page
  xdlm serve --model runs/mine --host 0.0.0.0 --api-key "$KEY" --max-length 512
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "It was"}'
"""


@dataclass(frozen=True)
class Options:
    model: tuple[str, ...] = ("pocket",)
    """Bundled names, checkpoint folders or run folders; the first answers where none is named."""
    host: str = "127.0.0.1"
    """Where to listen: this machine alone, unless told otherwise."""
    port: int = 8000
    """0 takes any that is free; it is printed."""
    api_key: str | None = None
    """Ask for this key, as `Authorization: Bearer KEY`; the environment's XDLM_API_KEY does the same, and
    does not show in the list of processes."""
    cors_origin: tuple[str, ...] = ()
    """Web pages of these origins may call; by default none."""
    max_length: int = 1024
    """Tokens of a text, its prompt included."""
    max_steps: int = 1024
    """Sampling steps of a request."""
    max_n: int = 16
    """Texts of a request."""
    max_score: int = 1 << 18
    """Tokens that go through the model to score texts: each of them, for every draw and two times more."""
    max_body: int = 1 << 20
    """Bytes of a request."""
    max_active: int = 16
    """Texts that are written side by side."""
    max_waiting: int = 256
    """Texts that may wait for that; what comes beyond is told to try again."""
    max_batch: int = 16
    """Texts that go through the model at once."""
    timeout: float = 60.0
    """Seconds until a request that is not finished is given up."""
    drain: float = 30.0
    """Seconds to finish what was begun when the server is told to stop."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights (ema), or the last ones of training (raw)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the trunk."""
    device: str = "auto"
    """auto, cpu or cuda."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm serve", description=_DESCRIPTION)
    _check(options)
    try:
        from xdlm.serve.web.app import make_app
        from xdlm.serve.web.server import bind, serve
    except ImportError as error:
        raise UserError(
            f"serving needs fastapi and uvicorn: pip install 'xdlm[serve]' ({error})"
        ) from error
    key = os.environ.get("XDLM_API_KEY") if options.api_key is None else options.api_key
    if key == "":
        raise UserError("the API key is empty")
    with bind(options.host, options.port) as listener:  # before models, which take their time
        service = _service(options)
        app = make_app(service, key=key, max_body=options.max_body, origins=options.cors_origin)
        ready = partial(_say_where, options.model, *listener.getsockname()[:2])
        serve(app, service, listener, drain=options.drain, ready=ready)


def _service(options: Options) -> Service:
    from xdlm.serve.engine import Limits
    from xdlm.serve.service import Bounds, Served, Service

    with waiting(f"reading {', '.join(options.model)}"):
        models = {
            name: load(
                name, device=options.device, weights=options.weights, precision=options.precision
            )
            for name in options.model
        }
    bounds = Bounds(
        options.max_length, options.max_steps, options.max_n, options.timeout, options.max_score
    )
    limits = Limits(options.max_active, options.max_waiting)
    return Service(
        [Served.start(name, m, bounds, limits, options.max_batch) for name, m in models.items()],
        bounds,
    )


def _say_where(models: Sequence[str], host: str, port: int) -> None:
    shown = f"[{host}]" if ":" in host else host
    console().print(
        f"{', '.join(models)}: http://{shown}:{port} (Ctrl-C stops)",
        soft_wrap=True,
    )  # fmt: skip


def _check(options: Options) -> None:
    if not options.model:
        raise UserError("which model? xdlm serve --model NAME")
    if len(set(options.model)) < len(options.model):
        raise UserError("a model is named twice")
    if not 0 <= options.port < 1 << 16:
        raise UserError(f"--port must lie in 0..65535, got {options.port}")
    for name in ("max_length", "max_steps", "max_n", "max_score", "max_body", "max_active", "max_waiting",
                 "max_batch"):  # fmt: skip
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("timeout", "drain"):
        if not 0 < getattr(options, name) < math.inf:
            raise UserError(f"--{name} must be positive, and not infinite")
