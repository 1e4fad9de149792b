"""A sampling run as data: the first state of each text or image and every event after it, as one document.

It is JSON; `trajectory.schema.json` beside this file is its schema. An event is [step, position, from, to,
probability]: in step `step` (from 1) the token at `position` (from 0) became another one, to which the
model gave that probability, before temperature and nucleus; null where it came from the noise. Every token
that the run visited is listed with its text or, of an image, with its colour.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from xdlm.api import Model
from xdlm.errors import UserError
from xdlm.report.image_tokens import Decoder, Layout, Palette, colours_of
from xdlm.sampling import ConfidenceConfig, Trajectory
from xdlm.sampling.writing import Config
from xdlm.tokens import ImageTokenizer

FORMAT, VERSION = "xdlm-trajectory", 1
SCHEMA = "trajectory.schema.json"
#: Tokens of all frames that a file may describe: what is read is unfolded in memory.
MAX_TOKENS = 200_000_000


class Speller(Protocol):
    """Whatever knows the text of each token: a tokenizer, or a recording."""

    def pieces(self, ids: Iterable[int]) -> list[str]: ...


class Event(NamedTuple):
    """A token that became another one; the field names are those of the schema."""

    step: int
    position: int
    before: int
    after: int
    probability: float | None


def run_details(name: str, model: Model, config: Config, *, seed: int, nfe: int) -> dict[str, str]:
    """What a run was made with, for those who look at it."""
    process = model.sampled_as or model.config.process
    return {
        "model": f"{name}, step {model.step}, {model.weights} weights",
        "noise": process.kind + (f", k = {process.k}" if process.k is not None else ""),
        "sampler": "confidence" if isinstance(config, ConfidenceConfig) else "ancestral",
        "steps": str(config.steps),
        "forward passes": str(nfe),
        "seed": str(seed),
        "temperature": str(config.filter.temperature),
        "top-p": str(config.filter.top_p),
    }


@dataclass(frozen=True)
class Recording:
    """A run with the text of every token that it visited, and what it was made with; a run of images with
    colours for texts, and where tokens stand."""

    trajectory: Trajectory
    spelling: Mapping[int, str]
    details: Mapping[str, str]
    layout: Layout | None = None
    tokenizer: Decoder | None = field(default=None, compare=False, repr=False)
    """What makes images of the tokens, where it is at hand: a file holds colours alone."""

    @classmethod
    def of(cls, trajectory: Trajectory, speller: Speller, details: Mapping[str, str]) -> Recording:
        ids = trajectory.frames.unique().tolist()
        return cls(trajectory, dict(zip(ids, speller.pieces(ids), strict=True)), details)

    @classmethod
    def of_images(
        cls, trajectory: Trajectory, tokenizer: ImageTokenizer, details: Mapping[str, str]
    ) -> Recording:
        colours = colours_of(tokenizer, trajectory.frames.unique().tolist())
        return cls(trajectory, colours, details, Layout.of(tokenizer), tokenizer)

    @property
    def kind(self) -> str:
        return "text" if self.layout is None else "image"

    @property
    def decoder(self) -> Decoder:
        """What makes images of the tokens."""
        assert self.layout is not None, "a text is no image"
        if self.tokenizer is not None:
            return self.tokenizer
        return Palette(self.layout, self.spelling, self.trajectory.special_ids)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self.spelling[i] for i in ids]

    def document(self) -> dict[str, Any]:
        """What the schema describes."""
        path = self.trajectory
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            **({} if self.layout is None else {"image": asdict(self.layout)}),
            "details": dict(self.details),
            "times": list(path.times),
            "masks": list(path.special_ids),
            "tokens": [[i, piece] for i, piece in self.spelling.items()],
            "samples": [
                {"first": path.frames[0, n].tolist(), "events": list(events(path, n))}
                for n in range(path.frames.shape[1])
            ],
        }

    def to_json(self) -> str:
        """The document, one line per sample, so that files can be compared line by line."""
        head = self.document()
        samples = ",\n".join(json.dumps(s, separators=(",", ":")) for s in head.pop("samples"))
        fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        return "{\n" + ",\n".join(fields) + f',\n"samples": [\n{samples}\n]\n}}\n'


def events(trajectory: Trajectory, sample: int) -> Iterator[Event]:
    """What changed in one sample, in the order of steps and then of positions."""
    frames = trajectory.frames[:, sample]
    step, position = (frames[1:] != frames[:-1]).nonzero().unbind(1)
    before, after = frames[step, position], frames[step + 1, position]
    if trajectory.probs is None:
        probs = [math.nan] * len(step)
    else:
        probs = trajectory.probs[step, sample, position].tolist()
    columns = (step + 1).tolist(), position.tolist(), before.tolist(), after.tolist(), probs
    for s, where, old, new, p in zip(*columns, strict=True):
        yield Event(s, where, old, new, None if math.isnan(p) else round(p, 6))


def schema() -> dict[str, Any]:
    """The JSON schema of the document."""
    return json.loads(resources.files("xdlm.report").joinpath(SCHEMA).read_text(encoding="utf-8"))


def read_recording(file: Path) -> Recording:
    """A recording that was written as JSON; anything else is a `UserError` that says what is wrong."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file} is not JSON; xdlm sample or paint --trajectory FILE.json writes what can be viewed"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(
            f"{file} is not a trajectory; xdlm sample or paint --trajectory FILE.json writes one"
        )
    if data.get("version") != VERSION:
        raise UserError(f"{file} has version {data.get('version')}; this xdlm reads {VERSION}")
    try:
        return _unfold(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise UserError(f"{file} is damaged: {error!r}") from error


def _unfold(data: Mapping[str, Any]) -> Recording:
    """The frames that the events describe, each event checked against the state that it changes."""
    times = tuple(float(t) for t in data["times"])
    samples, masks = data["samples"], tuple(int(i) for i in data["masks"])
    spelling = {int(i): str(piece) for i, piece in data["tokens"]}
    length = len(samples[0]["first"])
    if not times or len(times) * len(samples) * length > MAX_TOKENS:
        raise ValueError(f"{len(times)} frames of {len(samples)} x {length} tokens")
    layout = _layout(data, length)
    first = torch.tensor([sample["first"] for sample in samples], dtype=torch.int32)
    frames = first.expand(len(times), -1, -1).clone()
    probs = torch.full((len(times) - 1, *first.shape), math.nan)
    for number, sample in enumerate(samples):
        _replay(sample["events"], frames[:, number].numpy(), probs[:, number].numpy())
    unknown = set(frames.unique().tolist()) - set(spelling)
    if unknown:
        raise ValueError(f"tokens without text or colour: {sorted(unknown)[:3]}")
    details = {str(name): str(value) for name, value in data["details"].items()}
    if layout is not None:
        Palette(layout, spelling, masks)  # refuses what is no colour
    return Recording(Trajectory(frames, times, masks, probs), spelling, details, layout)


def _layout(data: Mapping[str, Any], length: int) -> Layout | None:
    """Files that say nothing of their kind are of text."""
    kind = data.get("kind", "text")
    if kind not in ("text", "image"):
        raise ValueError(f"kind {kind!r}")
    layout = Layout(**data["image"]) if kind == "image" else None
    if layout is not None and layout.length != length:
        raise ValueError(f"{length} tokens for an image of {layout.length}")
    return layout


def _replay(
    events: Sequence[Sequence[Any]], frames_TL: NDArray[np.int32], probs_TL: NDArray[np.float32]
) -> None:
    """Step by step, all events of a step at once: a run of images has millions."""
    if not events:
        return
    *columns, told = zip(*events, strict=True)
    step, position, before, after = (np.array(column) for column in columns)
    if any(column.dtype.kind != "i" for column in (step, position, before, after)):
        raise ValueError("an event with something else than whole numbers")
    inside = (step >= 1) & (step < len(frames_TL)) & (position >= 0)
    _check(inside & (position < frames_TL.shape[1]), events, "is outside the run")
    once = np.unique(np.stack([step, position]), axis=1).shape[1] == len(events)
    if not once:
        raise ValueError("two events at one step and position")
    follows = np.empty(len(events), dtype=bool)
    order = np.argsort(step, kind="stable")
    starts = np.searchsorted(step[order], np.arange(len(frames_TL) + 1))
    for now in range(1, len(frames_TL)):
        frames_TL[now] = frames_TL[now - 1]
        own = order[starts[now] : starts[now + 1]]
        follows[own] = frames_TL[now, position[own]] == before[own]
        frames_TL[now, position[own]] = after[own]
    _check(follows, events, "does not follow from the one before it")
    probs_TL[step - 1, position] = [math.nan if p is None else p for p in told]


def _check(holds: NDArray[np.bool_], events: Sequence[Sequence[Any]], says: str) -> None:
    if not holds.all():
        raise ValueError(f"event {list(events[int(np.argmin(holds))])} {says}")
