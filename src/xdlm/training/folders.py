"""Models as others publish them: a folder with config.json, safetensors and tokenizer.json.

LLaDA's is read by our own module, tensor by tensor, sharded or not, and so are backbones of our own; any
other's by transformers. No code that lies in a folder is run. Folders that we write also say under which
noise a model was trained (`note`), and are read back as such; others are models of masked noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from xdlm.config import DataConfig, ProcessConfig, RunConfig, from_tree
from xdlm.errors import UserError
from xdlm.files import atomic_folder
from xdlm.models import Denoiser, LladaConfig, ModelConfig, PretrainedConfig
from xdlm.models.pretrained import Pretrained
from xdlm.structs import Vocab
from xdlm.tokens import TextTokenizer, Tokenizer
from xdlm.tokens.text import SETTINGS
from xdlm.training.checkpoint import MODEL
from xdlm.training.note import ENTRY, Note, read_note
from xdlm.training.tensors import check_fit, fill, layout_of_file, read_file, save_tensors

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: Bytes of weights in a file, unless a single tensor has more.
SHARD_BYTES = 5_000_000_000


class Source(Protocol):
    """Where a model's weights can come from: a checkpoint of ours, or a folder of somebody else's."""

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> RunConfig: ...

    @property
    def step(self) -> int: ...

    @property
    def weights(self) -> str: ...

    def tokenizer(self) -> Tokenizer: ...

    def weight_files(self) -> list[Path]:
        """The safetensors that hold them."""

    def read_into(
        self, name: str, targets: Mapping[str, Tensor], *, whose: str = "its config.yaml"
    ) -> None: ...


@dataclass(frozen=True)
class Published:
    """The folder of a LLaDA, or of a backbone of our own."""

    folder: Path
    config: RunConfig
    step: int = 0
    weights: str = "published"

    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer.load(self.folder)

    def weight_files(self) -> list[Path]:
        return _files_of(self.folder)

    def read_into(
        self, name: str, targets: Mapping[str, Tensor], *, whose: str = f"its {CONFIG}"
    ) -> None:
        """Strictly, and tensor by tensor."""
        if name != MODEL:
            raise UserError(f"{self.folder} has one set of weights, and no raw ones beside it")
        files = self.weight_files()
        try:
            layout = {key: value for file in files for key, value in layout_of_file(file).items()}
            check_fit(layout, targets, self.folder, whose)
            for file in files:
                here = layout_of_file(file).keys()
                read_file(file, {key: targets[key].detach() for key in here})
        except SafetensorError as error:
            raise UserError(f"{self.folder} holds a damaged safetensors file: {error}") from error


@dataclass(frozen=True)
class PublishedOther:
    """The folder of a transformers model; to start from, unless it says that it was trained under noise."""

    folder: Path
    config: RunConfig
    step: int = 0
    weights: str = "published"
    is_denoiser: bool = False

    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer.load(self.folder)

    def weight_files(self) -> list[Path]:
        return _files_of(self.folder)

    def read_into(self, name: str, targets: Mapping[str, Tensor], *, whose: str = "") -> None:
        assert isinstance(self.config.model, PretrainedConfig)
        found = dict(Pretrained.read(self.config.model, self.folder).named_parameters())
        check_fit(found, targets, self.folder, whose or f"its {CONFIG}")
        for key, target in targets.items():
            fill(target.detach(), found[key].detach())


def is_published(folder: Path) -> bool:
    """Whether a folder is of the kind that hubs hold."""
    return (folder / CONFIG).is_file()


def open_published(folder: Path) -> Published | PublishedOther:
    """As the model that the folder says it is, or else as one of masked noise."""
    tree = _read_json(folder / CONFIG)
    if "model_type" not in tree:
        raise UserError(f"{folder / CONFIG} lacks model_type: it does not say what the model is")
    note = read_note(tree, folder)
    if tree.get("model_type") == LladaConfig.kind:
        shape = llada_config(tree, folder / CONFIG)
        if note is None:
            return Published(folder, _as_masked(shape, folder, shape.context))
        return Published(folder, replace(note.config, model=shape), note.step, note.weights)
    if note is None:
        longest = next((tree[name] for name in _LENGTHS if isinstance(tree.get(name), int)), 1024)
        return PublishedOther(folder, _as_masked(PretrainedConfig(str(folder)), folder, longest))
    if tree.get("model_type") == ENTRY:
        return Published(folder, note.config, note.step, note.weights)
    return PublishedOther(folder, note.config, note.step, note.weights, is_denoiser=True)


def _as_masked(model: ModelConfig, folder: Path, longest: int) -> RunConfig:
    data = DataConfig(tokenizer=str(folder), length=min(longest, 4096))
    return RunConfig(process=ProcessConfig("masked"), model=model, data=data)


#: What transformers models call the longest row that they were made for.
_LENGTHS = ("max_position_embeddings", "n_positions")


#: What our module does; a checkpoint that says otherwise is not one that it can run.
_FIXED: dict[str, Any] = {
    "activation_type": "silu", "alibi": False, "attention_layer_norm": False, "block_group_size": 1,
    "block_type": "llama", "include_bias": False, "include_qkv_bias": False, "input_emb_norm": False,
    "bias_for_layer_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True,
    "multi_query_attention": None, "rope": True, "rope_full_precision": True, "scale_logits": False,
    "weight_tying": False,
}  # fmt: skip
#: Published names of what varies.
_NAMES = {
    "depth": "n_layers", "width": "d_model", "heads": "n_heads", "mlp_width": "mlp_hidden_size",
    "vocab_size": "embedding_size", "mask_id": "mask_token_id", "context": "max_sequence_length",
    "rope_theta": "rope_theta", "norm_eps": "rms_norm_eps",
}  # fmt: skip


def llada_config(tree: Mapping[str, Any], where: Path) -> LladaConfig:
    """The shape that a published config.json describes."""
    for name, value in _FIXED.items():
        if name in tree and tree[name] != value:
            raise UserError(f"{where}: {name} is {tree[name]!r}, and only {value!r} can be run")
    if "n_heads" in tree and tree.get("n_kv_heads") not in (None, tree["n_heads"]):
        raise UserError(f"{where}: n_kv_heads differs from n_heads, which cannot be run")
    given = {**tree, "embedding_size": tree.get("embedding_size") or tree.get("vocab_size")}
    lacking = [name for name in _NAMES.values() if given.get(name) is None]
    if lacking:
        raise UserError(f"{where} lacks {', '.join(lacking)}: it does not describe a LLaDA")
    shape = {ours: given[theirs] for ours, theirs in _NAMES.items()}
    return from_tree(LladaConfig, shape, str(where), called=_NAMES)


def llada_tree(config: LladaConfig, eos_id: int) -> dict[str, Any]:
    """A config.json with the published keys."""
    return {
        **_FIXED,
        **{theirs: getattr(config, ours) for ours, theirs in _NAMES.items()},
        "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"], "attention_dropout": 0.0,
        "attention_layer_norm_with_affine": True, "embedding_dropout": 0.0, "eos_token_id": eos_id,
        "flash_attention": False, "init_cutoff_factor": None, "init_device": "meta",
        "init_fn": "mitchell", "init_std": 0.02, "mlp_ratio": 4, "model_type": "llada",
        "n_kv_heads": config.heads, "pad_token_id": eos_id, "precision": "amp_bf16",
        "residual_dropout": 0.0, "use_cache": False, "vocab_size": config.vocab_size,
    }  # fmt: skip


def own_tree(config: RunConfig, vocab: Vocab) -> dict[str, Any]:
    """A config.json for a backbone of our own, which `xdlm.auto` makes known to transformers."""
    return {
        "architectures": ["XdlmForMaskedLM"], "model_type": ENTRY, "vocab_size": vocab.size,
        "mask_token_id": vocab.mask_id, "max_position_embeddings": config.data.length,
    }  # fmt: skip


def write_published(
    folder: Path, denoiser: Denoiser, tokenizer: TextTokenizer, note: Note, card: str, *,
    dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """A folder that others can load: LLaDA's under its published names, others' as transformers has it.
    Weights are cast to `dtype`, if given, file by file: a large model is never held twice."""
    shape = note.config.model
    with atomic_folder(folder) as scratch:
        if isinstance(denoiser, Pretrained):
            denoiser.write(scratch, dtype)
            tree = _read_json(scratch / CONFIG)
        else:
            _write_weights(scratch, dict(denoiser.named_parameters()), dtype, shard_bytes)
            tree = (
                llada_tree(shape, tokenizer.eos_id)
                if isinstance(shape, LladaConfig)
                else own_tree(note.config, note.config.vocab(tokenizer.size))
            )
        _write_json(scratch / CONFIG, {**tree, ENTRY: note.tree()})
        for name, text in {**_settings(tokenizer), **tokenizer.files(), "README.md": card}.items():
            (scratch / name).write_text(text, encoding="utf-8")


def _settings(tokenizer: TextTokenizer) -> dict[str, str]:
    """What transformers asks of a tokenizer beside the tokens themselves; one's own come first."""
    begin, end = tokenizer.names_of([tokenizer.bos_id, tokenizer.eos_id])
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
    return {SETTINGS: json.dumps(own, indent=2) + "\n"}


def _write_weights(
    folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, shard_bytes: int
) -> None:
    """In one file, or in several with an index of which tensor is where."""

    def size_of(tensor: Tensor) -> int:
        return tensor.numel() * (dtype or tensor.dtype).itemsize

    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for key, tensor in tensors.items():
        if shards[-1] and filled + size_of(tensor) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][key] = tensor.detach()
        filled += size_of(tensor)
    names = [WEIGHTS]
    if len(shards) > 1:
        of = len(shards)
        names = [f"model-{i:05d}-of-{of:05d}.safetensors" for i in range(1, of + 1)]
        where = {key: name for name, part in zip(names, shards, strict=True) for key in part}
        total = sum(map(size_of, tensors.values()))
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    for name, part in zip(names, shards, strict=True):
        cast = {key: value.to("cpu", dtype).contiguous() for key, value in part.items()}
        save_tensors(cast, folder / name)


def _files_of(folder: Path) -> list[Path]:
    """The files that hold the weights."""
    if not (folder / INDEX).is_file():
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"{folder} has neither {WEIGHTS} nor {INDEX}")
        return [folder / WEIGHTS]
    where = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise UserError(f"{folder / INDEX} is damaged: it has no weight_map")
    files = sorted({folder / Path(str(name)).name for name in where.values()})
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder} is incomplete: {file.name} is missing")
    return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{file.parent} is not a Hugging Face model folder: {file.name} is missing"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{file} is damaged: it is not a mapping")
    return tree


def _write_json(file: Path, tree: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")
