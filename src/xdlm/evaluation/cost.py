"""What training took to get to a checkpoint, as a record."""

from __future__ import annotations

from typing import Any

from xdlm.evaluation.provenance import provenance
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.subject import Loaded
from xdlm.training.checkpoint import Checkpoint

METRIC = "train_seconds"


def training_cost(model: Loaded, name: str, checkpoint: Checkpoint) -> EvalRecord | None:
    """Seconds of the device that it was trained on, validations included; None if it does not say."""
    found: dict[str, Any] = dict(checkpoint.meta)
    if not {"seconds", "tokens", "device"} <= found.keys():
        return None
    about = {**provenance(model), "device": str(found["device"])}
    parameters = sum(p.numel() for p in model.denoiser.parameters())
    return EvalRecord(
        METRIC, float(found["seconds"]), None, 1, model.config.train.seed, name,
        details={"tokens": float(found["tokens"]), "parameters": float(parameters)}, **about,
    )  # fmt: skip
