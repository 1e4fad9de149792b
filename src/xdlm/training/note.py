"""What a published folder says of the noise that its model was trained under: `xdlm` in its config.json.

Whoever does not know us passes over it. Where files of data or a run lay is not among it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from xdlm.config import RunConfig, from_tree
from xdlm.errors import UserError
from xdlm.models import ModelConfig, PretrainedConfig

ENTRY = "xdlm"
#: What of a run's data a model needs to be used.
_DATA = ("length", "bos", "eos", "frame")


@dataclass(frozen=True)
class Note:
    """Noise, backbone and rows of a model, the step that it is of and which weights these are."""

    config: RunConfig
    step: int
    weights: str

    def tree(self) -> dict[str, Any]:
        """As it stands in config.json."""
        config = self.config
        model = config.model
        if isinstance(model, PretrainedConfig):  # the rest is what the file itself says
            shape: dict[str, Any] = {"shift": model.shift, "mask_id": model.mask_id}
        else:
            shape = asdict(model)
        return {
            "process": _given(asdict(config.process)),
            "model": {"kind": model.kind, **_given(shape)},
            "data": {name: getattr(config.data, name) for name in _DATA},
            "step": self.step,
            "weights": self.weights,
        }


def read_note(tree: Mapping[str, Any], folder: Path) -> Note | None:
    """None where nothing is said."""
    entry, where = tree.get(ENTRY), f"{folder}: {ENTRY} of its config.json"
    if entry is None:
        return None
    if not isinstance(entry, dict) or {"process", "model", "data", "step", "weights"} - set(entry):
        raise UserError(f"{where} is damaged: it lacks what describes a model")
    step, weights = entry["step"], entry["weights"]
    if not isinstance(step, int) or not isinstance(weights, str):
        raise UserError(f"{where} is damaged: step and weights are a number and a word")
    given = {name: entry[name] for name in ("process", "model", "data")}
    if isinstance(given["model"], dict) and given["model"].get("kind") == PretrainedConfig.kind:
        given["model"] = {**given["model"], "path": str(folder)}
    config = from_tree(RunConfig, given, where)
    config = replace(config, data=replace(config.data, tokenizer=str(folder)))
    return Note(config, step, weights)


def read_backbone(tree: Mapping[str, Any], where: str) -> ModelConfig:
    """The shape alone."""
    entry = tree.get(ENTRY)
    if not isinstance(entry, dict) or "model" not in entry:
        raise UserError(f"{where} does not say what the model is: it has no {ENTRY}.model")
    return from_tree(RunConfig, {"model": entry["model"]}, where).model


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
