"""Checkpoints of the MDLM, UDLM, GIDD and XDLM repositories: their DiT's weights under our names.

All four share one layout (that of SEDD and MDLM). Ours differs in names, and one matrix modulates all its
norms, whose rows are those of theirs. Files are read without running anything that they hold.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from xdlm.errors import UserError
from xdlm.models import DiTConfig, LevelDiTConfig

#: What a published folder may hold its weights in.
_FILES = ("model.safetensors", "model.pt", "pytorch_model.bin")
#: Their names outside of blocks, and within a block.
_OUTER = {
    "vocab_embed.embedding": "embed.weight",
    "sigma_map.mlp.0.weight": "time_embed.into.weight",
    "sigma_map.mlp.0.bias": "time_embed.into.bias",
    "sigma_map.mlp.2.weight": "time_embed.out.weight",
    "sigma_map.mlp.2.bias": "time_embed.out.bias",
    "output_layer.norm_final.weight": "final_norm.norm.weight",
    "output_layer.linear.weight": "out.weight",
    "output_layer.linear.bias": "out.bias",
}
_INNER = {
    "norm1.weight": "attn_norm.norm.weight",
    "attn_qkv.weight": "qkv.weight",
    "attn_out.weight": "attn_out.weight",
    "norm2.weight": "mlp_norm.norm.weight",
    "mlp.0.weight": "mlp_in.weight",
    "mlp.0.bias": "mlp_in.bias",
    "mlp.2.weight": "mlp_out.weight",
    "mlp.2.bias": "mlp_out.bias",
}
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "logit_bias")
_PREFIX = "backbone."


class Said(NamedTuple):
    """What a file, or a config.json beside it, says of its model; None where it says nothing."""

    time_conditioning: bool | None = None
    length: int | None = None
    heads: int | None = None
    p_uniform: float | None = None


_NOTHING = Said()


@dataclass(frozen=True)
class Foreign:
    """What a file holds: tensors under their names, averaged ones if it has them, and the step."""

    tensors: Mapping[str, Tensor]
    weights: str
    step: int
    said: Said = _NOTHING


def read_foreign(path: Path, *, averaged: bool = True) -> Foreign:
    """A file, or the folder that holds one."""
    file = _file_of(path)
    said = _said(file.with_name("config.json"))
    if file.suffix == ".safetensors":
        try:
            return Foreign(_backbone(load_file(file)), "ema", 0, said)
        except SafetensorError as error:
            raise UserError(f"{file} is damaged: {error}") from error
    content = _load_safely(file)
    if "state_dict" not in content:
        return Foreign(_backbone(content), "ema", 0, said)
    tensors, step = _backbone(content["state_dict"]), int(content.get("global_step", 0))
    said = Said(_setting(content.get("hyper_parameters"), "time_conditioning"))
    if not averaged:
        return Foreign(tensors, "raw", step, said)
    if not isinstance(content.get("ema"), dict):
        raise UserError(f"{file} has no averaged weights; ask for the raw ones")
    return Foreign(_averages(tensors, content["ema"]["shadow_params"], file), "ema", step, said)


def _said(file: Path) -> Said:
    """What the config.json of a folder from a hub says, under the names of these repositories."""
    if not file.is_file():
        return _NOTHING
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{file} is damaged: it is not a mapping")

    def given(kind: type, *names: str) -> Any:
        return next((tree[name] for name in names if type(tree.get(name)) is kind), None)

    return Said(
        given(bool, "time_conditioning"), given(int, "model_length", "max_seq_len"),
        given(int, "n_heads", "num_attention_heads"), given(float, "p_uniform"),
    )  # fmt: skip


def _file_of(path: Path) -> Path:
    if path.is_file():
        return path
    found = [path / name for name in _FILES if (path / name).is_file()] or sorted(
        path.glob("*.ckpt")
    )
    if not found:
        raise UserError(f"no weights at {path}: neither a file, nor a folder with {_FILES[0]}")
    if len(found) > 1:
        raise UserError(f"{path} holds several: say which, {found[0].name} or {found[1].name}")
    return found[0]


def _load_safely(file: Path) -> dict[str, Any]:
    """With torch's restricted unpickler. Objects that it does not know, configurations above all, become
    inert ones: no code but torch's runs."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        with torch.serialization.safe_globals([(_Inert, name) for name in unknown]):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, OSError, EOFError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{file} cannot be read safely: {reason}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no weights by name")
    return content


class _Inert:
    """Stands for an object of a class that is not ours: what it was made of, and nothing that it did."""

    def __new__(cls, *args: Any, **named: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **named: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def append(self, value: Any) -> None:
        return None

    def extend(self, values: Any) -> None:
        return None


def _setting(node: Any, name: str) -> bool | None:
    """Find a flag in a configuration, dictionaries and omegaconf's nodes within each other."""
    if isinstance(node, _Inert):
        return _setting(getattr(node, "state", None), name)
    if not isinstance(node, dict):
        return None
    value = node.get(name)
    if isinstance(value, _Inert) and isinstance(value.state, dict):
        value = value.state.get("_val")
    if isinstance(value, bool):
        return value
    inner = (_setting(each, name) for key, each in node.items() if key != "_parent")
    return next((found for found in inner if found is not None), None)


def _backbone(content: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if any(key.startswith(_PREFIX) for key in tensors):
        tensors = {k: v for k, v in tensors.items() if k.startswith(_PREFIX)}
    return {key.removeprefix(_PREFIX).replace("_orig_mod.", ""): v for key, v in tensors.items()}


def _averages(tensors: Mapping[str, Tensor], shadow: Any, file: Path) -> dict[str, Tensor]:
    """Averages come without names, in the order of the weights."""
    names = [key for key in tensors if key not in _BUFFERS]
    shapes = [tensors[name].shape for name in names]
    if not isinstance(shadow, list) or [getattr(each, "shape", None) for each in shadow] != shapes:
        raise UserError(f"{file}: the averaged weights do not fit the weights beside them")
    return {**tensors, **dict(zip(names, shadow, strict=True))}


#: What a model is told beside its tokens: nothing, the time as it is, or the noise level -log alpha.
Told = Literal["nothing", "time", "level"]


def dit_shape(foreign: Foreign, *, heads: int | None, told: Told) -> DiTConfig:
    """The shape of the model that some tensors are of."""
    tensors = foreign.tensors
    for name in ("vocab_embed.embedding", "sigma_map.mlp.0.weight", "blocks.0.mlp.0.weight"):
        if name not in tensors:
            raise UserError(f"these are not the weights of a published DiT: they lack {name}")
    width = tensors["vocab_embed.embedding"].shape[1]
    numbers = [int(m[1]) for key in tensors if (m := re.match(r"blocks\.(\d+)\.", key))]
    shape: dict[str, Any] = {
        "depth": 1 + max(numbers),
        "width": width,
        "heads": heads or foreign.said.heads or _heads_of(tensors, width),
        "cond_width": tensors["sigma_map.mlp.0.weight"].shape[0],
        "mlp_ratio": tensors["blocks.0.mlp.0.weight"].shape[0] // width,
    }
    if told == "level":
        return LevelDiTConfig(**shape)
    if told == "time":
        shape |= {"time_conditioning": True, "time_scale": 1.0}
    return DiTConfig(**shape)


def _heads_of(tensors: Mapping[str, Tensor], width: int) -> int:
    """By the rotary tables that are saved along."""
    if "rotary_emb.inv_freq" in tensors:
        return width // (2 * tensors["rotary_emb.inv_freq"].numel())
    if "rotary_emb.cos_cached" in tensors:
        return width // tensors["rotary_emb.cos_cached"].shape[-1]
    raise UserError("the number of heads is not in the file: give it with --heads")


def dit_tensors(foreign: Foreign, config: DiTConfig, vocab_size: int) -> dict[str, Tensor]:
    """The weights under our names, in float32; rows of the embedding and the head beyond the vocabulary,
    which some code adds for round numbers, are left out."""
    left = {key: value for key, value in foreign.tensors.items() if key not in _BUFFERS}
    bias = foreign.tensors.get("logit_bias")
    if bias is not None and bool((bias != 0).any()):
        raise UserError("this model adds to the logit of the token that it sees; ours cannot")
    found, modulation = {}, {"weight": [], "bias": []}  # type: ignore[var-annotated]

    def take(name: str) -> Tensor:
        if name not in left:
            raise UserError(f"these are not the weights of a published DiT: they lack {name}")
        return left.pop(name).float()

    for theirs, ours in _OUTER.items():
        found[ours] = take(theirs)
    for i in range(config.depth):
        for theirs, ours in _INNER.items():
            found[f"blocks.{i}.{ours}"] = take(f"blocks.{i}.{theirs}")
    for place in (*(f"blocks.{i}" for i in range(config.depth)), "output_layer"):
        for kind, parts in modulation.items():
            parts.append(take(f"{place}.adaLN_modulation.{kind}"))
    if left:
        raise UserError(f"the weights hold an unknown {min(left)}")
    found |= {f"modulation.{kind}": torch.cat(parts) for kind, parts in modulation.items()}
    for name in ("embed.weight", "out.weight", "out.bias"):
        found[name] = found[name][:vocab_size].clone()
    return found


def check_rows(foreign: Foreign, vocab_size: int) -> None:
    """That the weights are of this vocabulary, or of it rounded up to a multiple of 128."""
    rows = len(foreign.tensors["vocab_embed.embedding"])
    if rows not in (vocab_size, vocab_size + -vocab_size % 128):
        raise UserError(
            f"the weights are of {rows} states, the tokenizer and the noise make {vocab_size}: "
            "give the tokenizer that the model was trained with"
        )
