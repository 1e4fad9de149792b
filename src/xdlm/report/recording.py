"""A sampling run as data: the first state of each text and every event after it, as one JSON document.

`trajectory.schema.json` beside this file is its schema. An event is [step, position, from, to,
probability]: in step `step` (from 1) the token at `position` (from 0) became another one, to which the
model gave that probability, before temperature and nucleus; null where it came from the noise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from xdlm.errors import UserError
from xdlm.sampling import Trajectory

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


@dataclass(frozen=True)
class Recording:
    """A run with the text of every token that it visited, and what it was made with."""

    trajectory: Trajectory
    spelling: Mapping[int, str]
    details: Mapping[str, str]

    @classmethod
    def of(cls, trajectory: Trajectory, speller: Speller, details: Mapping[str, str]) -> Recording:
        ids = trajectory.frames.unique().tolist()
        return cls(trajectory, dict(zip(ids, speller.pieces(ids), strict=True)), details)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self.spelling[i] for i in ids]

    def document(self) -> dict[str, Any]:
        """What the schema describes."""
        path = self.trajectory
        return {
            "format": FORMAT,
            "version": VERSION,
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
        """The document, one line per text, so that files can be compared line by line."""
        head = self.document()
        samples = ",\n".join(json.dumps(s, separators=(",", ":")) for s in head.pop("samples"))
        fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        return "{\n" + ",\n".join(fields) + f',\n"samples": [\n{samples}\n]\n}}\n'


def events(trajectory: Trajectory, sample: int) -> Iterator[Event]:
    """What changed in one text, in the order of steps and then of positions."""
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
            f"{file} is not JSON; xdlm sample --trajectory FILE.json writes what can be viewed"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(
            f"{file} is not a trajectory; xdlm sample --trajectory FILE.json writes one"
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
    first = torch.tensor([sample["first"] for sample in samples], dtype=torch.int32)
    frames = first.expand(len(times), -1, -1).clone()
    probs = torch.full((len(times) - 1, *first.shape), math.nan)
    for number, sample in enumerate(samples):
        _replay(sample["events"], frames[:, number], probs[:, number])
    unknown = set(frames.unique().tolist()) - set(spelling)
    if unknown:
        raise ValueError(f"tokens without text: {sorted(unknown)[:3]}")
    details = {str(name): str(value) for name, value in data["details"].items()}
    return Recording(Trajectory(frames, times, masks, probs), spelling, details)


def _replay(
    events: Sequence[Sequence[Any]], frames_TL: torch.Tensor, probs_TL: torch.Tensor
) -> None:
    for event in events:
        step, position, before, after, probability = Event(*event)
        if not (1 <= step < len(frames_TL) and 0 <= position < frames_TL.shape[1]):
            raise ValueError(f"event {list(event)} is outside the run")
        if int(frames_TL[step, position]) != before:
            raise ValueError(f"event {list(event)} does not follow from the one before it")
        frames_TL[step:, position] = after
        if probability is not None:
            probs_TL[step - 1, position] = probability
