"""Any masked or causal language model of transformers as a denoiser.

A causal model is made to look both ways; one that cannot be (a recurrent one) is refused. Where there is no
mask among its tokens one is added: a new row of the embedding, the mean of all others.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from xdlm.errors import UserError
from xdlm.models.contract import BackboneConfig, Denoiser, Exchange, refuse_labels
from xdlm.models.exchanging import exchanging, first_place, rehearse, use_exchanges
from xdlm.ops.attention import right_gradients
from xdlm.structs import Vocab

#: What tokenizers call a mask.
_MASKS = ("[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>")


@dataclass(frozen=True)
class PretrainedConfig(BackboneConfig):
    """A model of the transformers library. All of the folder that a checkpoint needs is kept in it."""

    kind: ClassVar[str] = "pretrained"
    free: ClassVar[tuple[str, ...]] = ("path", "architecture")  # the weights' names and shapes tell

    path: str = ""
    """Folder with config.json, safetensors and tokenizer.json; training starts with these weights."""
    shift: bool = False
    """The state at a position is that of the token after it, as a causal model has learned it."""
    mask_id: int | None = None
    """The token that is the mask (default: the tokenizer's; or a new one, if it has none)."""
    architecture: str | None = None
    """The content of config.json (default: as it is in the folder)."""

    def __post_init__(self) -> None:
        given = self.architecture
        tree = _read_json(Path(self.path) / "config.json") if given is None else json.loads(given)
        tree.pop("xdlm", None)  # what we say of our own models is no part of the architecture
        for name, kind in (("model_type", str), ("vocab_size", int)):
            if not isinstance(tree.get(name), kind):
                where = "model.architecture" if given else Path(self.path) / "config.json"
                raise UserError(f"{where} has no {name}: not a text model of transformers")
        mask_id = _mask_of(Path(self.path)) if given is None and self.mask_id is None else None
        if mask_id is None:
            mask_id = tree["vocab_size"] if self.mask_id is None else self.mask_id
        if not 0 <= mask_id <= tree["vocab_size"]:
            raise UserError(f"model.mask_id {mask_id} is outside 0..{tree['vocab_size']}")
        object.__setattr__(self, "mask_id", mask_id)
        object.__setattr__(self, "architecture", json.dumps(tree, sort_keys=True))

    def own_vocab(self) -> Vocab:
        assert self.mask_id is not None
        return Vocab(max(self.shape["vocab_size"], self.mask_id + 1), self.mask_id)

    def start(self) -> str:
        return self.path

    @property
    def shape(self) -> dict[str, Any]:
        """The model's own configuration."""
        assert self.architecture is not None
        return json.loads(self.architecture)


class Pretrained(Denoiser):
    """A `Denoiser` around a transformers model; of fresh weights, unless the model is given. All that comes
    before the last linear layer, a BERT head's transform included, is the trunk."""

    takes_padding = True

    def __init__(
        self, config: PretrainedConfig, vocab_size: int, *, causal: bool = False, lm: Any = None
    ) -> None:
        super().__init__()
        assert vocab_size == config.own_vocab().size
        if causal:
            raise UserError("a pretrained model is trained under noise here, not autoregressively")
        self.config, self.lag = config, int(config.shift)
        self.lm = _fresh(config) if lm is None else lm
        self._first, self._exchanges = first_place(self.lm), False
        self._longest = _longest(self.lm, self._first)
        self._add_mask(vocab_size)
        _look_both_ways(self.lm)
        _leave_out_the_head(self.lm)

    def _add_mask(self, vocab_size: int) -> None:
        known = self.lm.get_input_embeddings().weight.shape[0]
        if known == vocab_size:
            return
        assert known == vocab_size - 1
        self.lm.resize_token_embeddings(vocab_size, mean_resizing=False)
        with torch.no_grad():
            for layer in (self.lm.get_input_embeddings(), self.lm.get_output_embeddings()):
                layer.weight[-1] = layer.weight[:-1].mean(0)

    @classmethod
    def read(cls, config: PretrainedConfig, folder: Path) -> Pretrained:
        """With the weights of a folder, all of them there; no code of the folder's is run."""
        with _transformers() as library:
            lm, found = _auto_class(library, config.shape).from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, local_files_only=True,
                trust_remote_code=False, use_safetensors=True,
            )  # fmt: skip
        missing = sorted(found["missing_keys"])
        if missing:
            raise UserError(f"{folder} lacks weights of its model: {missing[0]}")
        return cls(config, config.own_vocab().size, lm=lm)

    def write(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """config.json and safetensors, as `from_pretrained` reads them, cast to `dtype` if given."""
        with _transformers():
            lm = self.lm if dtype in (None, self.lm.dtype) else copy.deepcopy(self.lm).to(dtype)
            lm.save_pretrained(folder)

    @property
    def head_weight(self) -> Tensor:
        return self.lm.get_output_embeddings().weight

    @property
    def head_bias(self) -> Tensor | None:
        return self.lm.get_output_embeddings().bias

    def trunk(
        self, z: Tensor, t: Tensor, label: Tensor | None = None, *, padding: Tensor | None = None
    ) -> Tensor:
        refuse_labels(label)
        self._check_length(z.shape[1])
        seen = None if padding is None else (~padding).long()
        # Models that number tokens rather than places would miscount where noise is a padding token.
        places = {"position_ids": self._places(z, 0)} if self._first else {}
        with right_gradients(z.shape[1], wanted=torch.is_grad_enabled()):
            found = self.lm(input_ids=z, attention_mask=seen, **places)
        return self._shifted(found.logits)

    def trunk_at(self, z: Tensor, t: Tensor, start: int, exchange: Exchange) -> Tensor:
        if not self._exchanges:
            self._exchanges = True
            use_exchanges(self.lm)
            rehearse(self, self.lm)
        self._check_length(start + z.shape[1])
        with exchanging(exchange):
            return self._shifted(self.lm(input_ids=z, position_ids=self._places(z, start)).logits)

    def _check_length(self, length: int) -> None:
        if self._longest is not None and length > self._longest:
            raise UserError(
                f"this {self.lm.config.model_type} model has {self._longest} places, and a row has "
                f"{length} tokens: make it shorter"
            )

    def _places(self, z: Tensor, start: int) -> Tensor:
        start += self._first
        return torch.arange(start, start + z.shape[1], device=z.device).expand_as(z)

    def _shifted(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1) if self.config.shift else hidden


def _longest(lm: Any, first: int) -> int | None:
    """Tokens of the longest row, where places are learned one by one; None where any length will do."""
    learned = any(
        isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
        for name, module in lm.named_modules()
    )
    return lm.config.max_position_embeddings - first if learned else None


def _fresh(config: PretrainedConfig) -> Any:
    with _transformers() as library:
        shape = {key: value for key, value in config.shape.items() if key != "model_type"}
        own = library.AutoConfig.for_model(config.shape["model_type"], **shape)
        auto = _auto_class(library, config.shape)
        return auto.from_config(own, dtype=torch.float32)


def _auto_class(library: Any, shape: dict[str, Any]) -> Any:
    """By the name that the weights were saved under."""
    masked = any("ForMaskedLM" in name for name in shape.get("architectures") or [""])
    return library.AutoModelForMaskedLM if masked else library.AutoModelForCausalLM


def _look_both_ways(lm: Any) -> None:
    """Let every position see all others, and check that it does."""
    lm.config.is_causal, lm.config.use_cache = False, False
    for module in lm.modules():
        if getattr(module, "is_causal", False):
            module.is_causal = False
    tokens = torch.arange(4, device=lm.device)[None] % lm.config.vocab_size
    changed = tokens.clone()
    changed[0, -1] = 0
    first, other = (_logits_of(lm, each)[0, 0] for each in (tokens, changed))
    if torch.equal(first, other):
        raise UserError(
            f"a {lm.config.model_type} model cannot be made to look both ways: no denoiser"
        )


def _leave_out_the_head(lm: Any) -> None:
    """Have the model return what its last linear layer would be given. What some models do to the logits
    after that (a cap, a scale) would be lost, so they are refused."""
    layer = lm.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise UserError(f"a {lm.config.model_type} model has no linear head: no denoiser")
    capped = getattr(lm.config, "final_logit_softcapping", None) is not None  # small logits hide it
    tokens = torch.arange(4, device=lm.device)[None] % lm.config.vocab_size
    logits = _logits_of(lm, tokens)
    vars(layer)["forward"] = _as_it_is
    hidden = _logits_of(lm, tokens)
    with torch.no_grad():
        again = nn.functional.linear(hidden, layer.weight, layer.bias)
    scale = float(logits.abs().max()) or 1.0
    if capped or not float((again - logits).abs().max()) <= 1e-3 * scale:
        raise UserError(
            f"a {lm.config.model_type} model does more to its logits than a linear layer: not a denoiser"
        )


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


@torch.no_grad()
def _logits_of(lm: Any, tokens: Tensor) -> Tensor:
    was_training = lm.training
    try:
        return lm.eval()(input_ids=tokens).logits
    finally:
        lm.train(was_training)


@contextmanager
def _transformers() -> Iterator[Any]:
    """The library, quiet, and with one line for whatever it does not like."""
    try:
        import transformers
    except ImportError as error:
        raise UserError("a pretrained model needs transformers: install xdlm[text]") from error
    shown = transformers.logging.is_progress_bar_enabled()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield transformers
    except (ValueError, OSError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"transformers cannot make this model: {reason}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
        if shown:
            transformers.logging.enable_progress_bar()


def _mask_of(folder: Path) -> int | None:
    """The id of the mask in a folder's tokenizer.json."""
    file = folder / "tokenizer.json"
    try:
        tokens = _read_json(file).get("added_tokens") or []
        ids = {token["content"]: token["id"] for token in tokens}
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged: its added_tokens have no content and id") from error
    return next((ids[name] for name in _MASKS if name in ids), None)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"model.path: there is no {file}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{file} is damaged: it is not a mapping")
    return tree
