"""Checkpoints: a folder of safetensors, JSON and YAML that is whole or not there.

checkpoint.json        format, step, library version, and the size and hash of every other file
config.yaml            the resolved configuration
tokenizer.json         the tokenizer
model.safetensors      the weights to use: averaged (EMA) unless checkpoint.json says otherwise
raw.safetensors        the weights as trained            } only where training
optimizer.safetensors  AdamW's moments                   } can go on from
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from xdlm.config import RunConfig, dump_config, parse_config
from xdlm.errors import UserError
from xdlm.files import atomic_folder, remove_folder, sha256_of
from xdlm.tokens import TextTokenizer

FORMAT = 1
_STEP = re.compile(r"step-\d{8,}")
META, CONFIG, TOKENIZER = "checkpoint.json", "config.yaml", "tokenizer.json"
MODEL, RAW, OPTIMIZER = "model.safetensors", "raw.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose files have been found complete and unchanged. Tensors are read on demand."""

    folder: Path
    meta: Mapping[str, Any]
    config: RunConfig

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    @property
    def weights(self) -> str:
        """What model.safetensors holds: "ema" or "raw"."""
        return str(self.meta["weights"])

    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer.load(self.folder / TOKENIZER)

    def tensors(self, name: str) -> dict[str, Tensor]:
        if name not in self.meta["files"]:
            what = (
                "it is no model" if name == MODEL else "it holds a model, not a state to go on from"
            )
            raise UserError(f"{self.folder} has no {name}: {what}")
        try:
            return load_file(self.folder / name)
        except SafetensorError as error:
            raise UserError(f"{self.folder / name} is damaged: {error}") from error


def save_checkpoint(
    folder: Path,
    *,
    config: RunConfig,
    tokenizer_json: str,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    weights: str = "ema",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint: `tensors` maps file names (MODEL, RAW, OPTIMIZER) to their content."""
    import torch

    from xdlm import __version__

    with atomic_folder(folder) as scratch:
        (scratch / CONFIG).write_text(dump_config(config), encoding="utf-8")
        (scratch / TOKENIZER).write_text(tokenizer_json, encoding="utf-8")
        for name, content in tensors.items():
            contiguous = {key: value.detach().contiguous().cpu() for key, value in content.items()}
            _save_tensors(contiguous, scratch / name)
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
            for file in sorted(scratch.iterdir())
        }
        meta = {
            "format": FORMAT,
            "step": step,
            "weights": weights,
            "xdlm": __version__,
            "torch": torch.__version__,
            **(extra or {}),
            "files": files,
        }
        (scratch / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Check that a checkpoint is whole: every file there, of the right size and content."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no checkpoint folder at {folder}")
    meta = _read_meta(folder)
    for name, expected in meta["files"].items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{folder} is incomplete: {name} is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise UserError(
                f"{file} is truncated or altered: {size} bytes, not {expected['bytes']}"
            )
        if sha256_of(file) != expected["sha256"]:
            raise UserError(f"{file} is damaged: its content does not match {META}")
    if CONFIG not in meta["files"]:
        raise UserError(f"{folder} is incomplete: {META} does not list {CONFIG}")
    config = parse_config((folder / CONFIG).read_text(encoding="utf-8"), str(folder / CONFIG))
    return Checkpoint(folder, meta, config)


def latest_checkpoint(run: str | Path) -> Path | None:
    """The newest checkpoint of a run, whole by construction; None if there is none."""
    found = run_checkpoints(Path(run))
    return found[-1] if found else None


def run_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first: what training wrote, and nothing else that is there."""
    found = [
        folder
        for folder in run.glob("step-*")
        if _STEP.fullmatch(folder.name) and (folder / META).is_file()
    ]
    return sorted(found, key=lambda folder: int(folder.name.removeprefix("step-")))


def clear_run(run: Path) -> None:
    """Remove what an earlier run left in a folder: its checkpoints and its log, nothing else."""
    for folder in run_checkpoints(run):
        remove_folder(folder)
    (run / "log.jsonl").unlink(missing_ok=True)


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def load_weights(model: Any, tensors: Mapping[str, Tensor], where: Path) -> None:
    """Strictly: the same names and shapes, or an error that says which differ."""
    wanted = dict(model.named_parameters())
    missing, surplus = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or surplus:
        what = f"lacks {missing[0]}" if missing else f"holds an unknown {surplus[0]}"
        raise UserError(f"{where} does not fit its config.yaml: it {what}")
    for name, parameter in wanted.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(
                f"{where} does not fit its config.yaml: {name} has shape "
                f"{tuple(tensors[name].shape)}, the model {tuple(parameter.shape)}"
            )
        parameter.data.copy_(tensors[name])


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / META
    if not file.is_file():
        raise UserError(f"{folder} is not a checkpoint: it has no {META}")
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is damaged: {error}") from error
    wanted = {"files": dict, "step": int, "weights": str}
    if not isinstance(meta, dict) or not all(isinstance(meta.get(k), t) for k, t in wanted.items()):
        raise UserError(f"{file} is damaged: it lacks one of {', '.join(wanted)}")
    for name, entry in meta["files"].items():
        if not isinstance(entry, dict) or not {"bytes", "sha256"} <= entry.keys():
            raise UserError(f"{file} is damaged: no size and hash for {name}")
    if meta.get("format") != FORMAT:
        raise UserError(f"{file} has format {meta.get('format')}; this version reads {FORMAT}")
    return meta


def _save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(str(error)) from error
