"""Checkpoints: a folder of safetensors, JSON and YAML that is whole or not there.

checkpoint.json        format, step, library version, and the size and hash of every other file; for
                       adapters also a fingerprint of the weights that they stand beside
config.yaml            the resolved configuration
tokenizer.json         the tokenizer; and where it has a chat template, the files that hold that
model.safetensors      the weights to use: averaged (EMA) unless checkpoint.json says otherwise
raw.safetensors        the weights as trained            } only where training
optimizer.safetensors  AdamW's moments                   } can go on from

A run whose weights are sharded over processes has folders in place of the last three, `model/` and so on,
with a file of every process: what torch.distributed.checkpoint writes, in its safetensors form, which
unlike its usual one holds no pickle. Whoever reads a checkpoint need not know: `Checkpoint` puts together
what is asked for, all of a tensor or this process's part of it, however many processes wrote it.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from xdlm.config import RunConfig, dump_config, parse_config
from xdlm.errors import UserError
from xdlm.files import atomic_folder, remove_folder, sha256_of
from xdlm.tokens import Tokenizer, read_tokenizer
from xdlm.training.tensors import check_fit, in_bytes, layout_of_file, read_file, save_tensors

FORMAT = 2
_STEP = re.compile(r"step-\d{8,}")
META, CONFIG, TOKENIZER = "checkpoint.json", "config.yaml", "tokenizer.json"
MODEL, RAW, OPTIMIZER = "model.safetensors", "raw.safetensors", "optimizer.safetensors"
#: What checkpoint.json calls the fingerprint.
BASE = "base_fingerprint"


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

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.folder / TOKENIZER)

    def weight_files(self) -> list[Path]:
        """Those that hold the weights to use, be it one or one of every process."""
        parts = shard_folder(self.folder, MODEL)
        files = sorted(self.folder / name for name in self.meta["files"])
        return [
            file
            for file in files
            if file.suffix == ".safetensors" and (file.name == MODEL or file.parent == parts)
        ]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All that MODEL, RAW or OPTIMIZER holds."""
        found = {key: torch.empty(s.shape, dtype=s.dtype) for key, s in self._layout(name).items()}
        self.read_into(name, found)
        return found

    def read_into(
        self, name: str, targets: Mapping[str, Tensor], *, whose: str = "its config.yaml"
    ) -> None:
        """Fill tensors, or this process's parts of them if they are sharded. Strictly: the same names
        and shapes, or an error that says which differ; `whose` they are, if not the checkpoint's own."""
        where = self.folder / name
        check_fit(self._layout(name), targets, where, whose)
        plain = {key: target.detach() for key, target in targets.items()}
        if self._is_sharded(name):
            _read_shards(shard_folder(self.folder, name), plain)
        else:
            read_file(where, plain)

    def _is_sharded(self, name: str) -> bool:
        folder = shard_folder(self.folder, name).name
        return any(Path(file).parent.name == folder for file in self.meta["files"])

    def _layout(self, name: str) -> dict[str, Tensor]:
        """Names, shapes and dtypes, as tensors without content."""
        try:
            if name in self.meta["files"]:
                return layout_of_file(self.folder / name)
            if self._is_sharded(name):
                return _layout_of_shards(shard_folder(self.folder, name))
        except SafetensorError as error:
            raise UserError(f"{self.folder / name} is damaged: {error}") from error
        what = (
            "it is not a model" if name == MODEL else "it holds a model, not a state to go on from"
        )
        raise UserError(f"{self.folder} has no {name}: {what}")


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds: `tensors` maps file names (MODEL, RAW, OPTIMIZER) to their content, and so
    does `tokenizer_files` those of the tokenizer."""

    config: RunConfig
    tokenizer_files: Mapping[str, str]
    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    weights: str = "ema"
    extra: Mapping[str, Any] = field(default_factory=dict)


def save_checkpoint(folder: Path, content: Content) -> None:
    """Write a checkpoint of whole tensors."""
    with atomic_folder(folder) as scratch:
        for name, tensors in content.tensors.items():
            on_host = {key: value.detach().contiguous().cpu() for key, value in tensors.items()}
            save_tensors(on_host, scratch / name)
        seal(scratch, content, describe_files(scratch, _files_below(scratch)))


def save_weights(
    folder: Path,
    denoiser: nn.Module,
    tokenizer: Tokenizer,
    config: RunConfig,
    *,
    step: int,
    weights: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a checkpoint of a model's weights alone, cast to `dtype` if given (int8: matrices as bytes, and
    a number for each of their rows)."""
    held: dict[str, Tensor] = dict(denoiser.named_parameters())
    if dtype == torch.int8:
        held = in_bytes(held)
    elif dtype is not None:
        held = {name: p.to(dtype) for name, p in held.items()}
    save_checkpoint(folder, Content(config, tokenizer.files(), step, {MODEL: held}, weights))


def seal(scratch: Path, content: Content, described: Mapping[str, Any]) -> None:
    """Write all but the tensors, whose files are `described` already."""
    from xdlm import __version__

    texts = {CONFIG: dump_config(content.config), **content.tokenizer_files}
    for name, text in texts.items():
        (scratch / name).write_text(text, encoding="utf-8")
    meta = {
        "format": FORMAT,
        "step": content.step,
        "weights": content.weights,
        "xdlm": __version__,
        "torch": torch.__version__,
        **content.extra,
        "files": {**describe_files(scratch, [scratch / name for name in texts]), **described},
    }
    (scratch / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def describe_files(folder: Path, files: Iterable[Path]) -> dict[str, Any]:
    """Size and hash of files, by their place in a folder."""
    return {
        file.relative_to(folder).as_posix(): {
            "bytes": file.stat().st_size,
            "sha256": sha256_of(file),
        }
        for file in files
    }


def shard_folder(checkpoint: Path, name: str) -> Path:
    """Where the processes' parts of MODEL, RAW or OPTIMIZER lie."""
    return checkpoint / Path(name).stem


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
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """The step that a run's checkpoint is of, by its name."""
    return int(folder.name.removeprefix("step-"))


def drop_old_checkpoints(run: Path, *, keep: int, keep_every: int) -> None:
    """Remove all checkpoints of a run but the newest `keep` and those at multiples of `keep_every`."""
    for folder in run_checkpoints(run)[:-keep]:
        if not keep_every or step_of(folder) % keep_every:
            remove_folder(folder)


def clear_scratch(run: Path) -> None:
    """Remove what a kill in the middle of writing left behind."""
    for rest in (*run.glob(".step-*.partial"), *run.glob(".step-*.removed")):
        shutil.rmtree(rest)


def clear_run(run: Path) -> None:
    """Remove what an earlier run left in a folder: its checkpoints and its log, nothing else."""
    for folder in run_checkpoints(run):
        remove_folder(folder)
    (run / "log.jsonl").unlink(missing_ok=True)


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


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


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _layout_of_shards(folder: Path) -> dict[str, Tensor]:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    known = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        key: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")  # type: ignore[union-attr]
        for key, entry in known.items()
    }


def _read_shards(folder: Path, targets: Mapping[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():  # that every process reads for itself, as we ask
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(dict(targets), storage_reader=reader, no_dist=True)
