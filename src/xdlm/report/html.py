"""A sampling run as one web page that stands alone: mail it, open it from disk, archive it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from xdlm.report.colours import LOOKS, MASK
from xdlm.report.image_tokens import Layout
from xdlm.report.recording import Speller
from xdlm.sampling import Trajectory

#: Modules that are not of one page alone, each behind those that it imports. Their names share a scope.
_SHARED = ("dom.js", "spelling.js", "run.js", "chart.js", "history.js", "view.js", "player.js")
_TEXT_HINT = "Point at a token, or tap it, for its history."
_IMAGE_HINT = "On the left the image, with masks in grey; on the right what the step changed."


def trajectory_page(
    trajectory: Trajectory, tokenizer: Speller, *, title: str, details: Mapping[str, str],
    layout: Layout | None = None,
) -> str:  # fmt: skip
    """All samples of a run, step by step, with a slider; `details` goes into a small table. With a `layout`
    they are images, and `tokenizer` spells colours.

    The page asks for nothing beyond itself, and its content policy has the browser enforce that.
    """
    return _fill(
        _part("page.html"),
        {
            "title": escape(title),
            "details": _details_rows(details),
            "legend": _legend(),
            "hint": _TEXT_HINT if layout is None else _IMAGE_HINT,
            "style": theme() + _part("page.css"),
            "script": _script(),
            "data": _embeddable(page_data(trajectory, tokenizer, layout)),
        },
    )


def page_data(
    trajectory: Trajectory, tokenizer: Speller, layout: Layout | None = None
) -> dict[str, Any]:
    """What the script of the page draws.

    Most positions keep still in most steps, so a sample is its first frame and then, for each step,
    a flat list of (position, token, kind of change, probability in per mille or -1). Tokens are
    numbered by `ids` and `pieces`, which hold only those that the run visited.
    """
    ids, frames = trajectory.frames.cpu().unique(return_inverse=True)
    changes = trajectory.changes().cpu()
    if trajectory.probs is None:
        probs = torch.full(changes.shape, -1)
    else:
        probs = (1000 * trajectory.probs).round().nan_to_num(-1).int()
    return {
        "image": None if layout is None else asdict(layout),
        "ids": ids.tolist(),
        "pieces": tokenizer.pieces(ids.tolist()),
        "masks": [
            i for i, token_id in enumerate(ids.tolist()) if token_id in trajectory.special_ids
        ],
        "times": [round(time, 6) for time in trajectory.times],
        "samples": [
            _sample_data(frames[:, sample], changes[:, sample], probs[:, sample])
            for sample in range(frames.shape[1])
        ],
    }


def _sample_data(frames_TL: Tensor, changes_TL: Tensor, probs_TL: Tensor) -> dict[str, Any]:
    steps = []
    for before, after, change, prob in zip(
        frames_TL[:-1], frames_TL[1:], changes_TL, probs_TL, strict=True
    ):
        position = (before != after).nonzero().squeeze(-1)
        facts = (position, after[position], change[position], prob[position])
        steps.append(torch.stack([fact.long() for fact in facts], dim=1).flatten().tolist())
    return {"first": frames_TL[0].tolist(), "steps": steps}


def _embeddable(data: dict[str, Any]) -> str:
    """JSON in which no text can end the script element that holds it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _details_rows(details: Mapping[str, str]) -> str:
    return "\n".join(
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(str(value))}</td></tr>'
        for name, value in details.items()
    )


def theme() -> str:
    """What all pages look like, with the paper's colours as variables."""
    looks = [MASK, *LOOKS.values()]
    colours = " ".join(f"--{look.name}: {look.colour};" for look in looks)
    return f":root {{ {colours} }}\n{_part('theme.css')}"


def _legend() -> str:
    """One entry per kind of change, and one for masks; the script fills in the counts."""
    entries = [(look.name, look.meaning) for look in (*LOOKS.values(), MASK)]
    return "\n".join(
        f'<li><span class="swatch {name}"></span>{name} <b class="count-{name}"></b>'
        f"<small>{escape(meaning)}</small></li>"
        for name, meaning in entries
    )


def shared_modules() -> dict[str, bytes]:
    """What shows and plays a run, for a page that can import it."""
    return {name: _part(name).encode() for name in _SHARED}


def _script() -> str:
    """All modules as one: a page that stands alone has nowhere to import from."""
    modules = "\n".join(_part(name) for name in (*_SHARED, "page.js"))
    return re.sub(r"^(import .*;\n|export )", "", modules, flags=re.MULTILINE)


def _part(name: str) -> str:
    return resources.files("xdlm.report").joinpath("page", name).read_text(encoding="utf-8")


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each {{name}}, in one pass: a value that looks like a placeholder stays as it is."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)
