"""Configurations from YAML, strictly, and back."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from xdlm.config.run import RunConfig
from xdlm.errors import UserError, did_you_mean
from xdlm.models import BACKBONES, PRESETS, DiTConfig, ModelConfig
from xdlm.models.contract import BackboneConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
#: Types as a person calls them.
_IN_WORDS: dict[type, str] = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false",
}  # fmt: skip


def load_config(path: str | Path) -> RunConfig:
    """Read a recipe."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"no such recipe: {path}{_near_recipe(Path(path))}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: it is not text (UTF-8)") from error
    if not text.strip():
        raise UserError(f"{path} is empty; recipes/cpu-tiny.yaml is an example of a recipe")
    config = parse_config(text, str(path))
    config.refuse_idle()
    return config


def _near_recipe(path: Path) -> str:
    """A recipe of a similar name, there or in the folder recipes."""
    files = {
        file.stem: file
        for folder in (Path("recipes"), path.parent)
        for file in folder.glob("*.yaml")
    }
    close = get_close_matches(path.stem, files, n=1)
    return f"; did you mean '{files[close[0]]}'?" if close else ""


def parse_config(text: str, name: str = "the configuration") -> RunConfig:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{name} is not YAML: {_gist(error)}") from error
    return from_tree(RunConfig, tree if tree is not None else {}, name)


def _gist(error: yaml.YAMLError) -> str:
    """Where and what, without the excerpt."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    return f"line {error.problem_mark.line + 1}: {error.problem}"


def dump_config(config: RunConfig) -> str:
    """YAML that `parse_config` reads back to an equal configuration; unset options are left out."""
    tree = {
        section: {
            k: v for k, v in values.items() if v is not None or (section, k) == ("data", "val")
        }
        for section, values in dataclasses.asdict(config).items()
    }
    if config.model.kind != DiTConfig.kind:  # which is meant where nothing is said
        tree["model"] = {"kind": config.model.kind, **tree["model"]}
    return yaml.safe_dump(tree, sort_keys=False)


def from_tree(cls: type[T], tree: Any, where: str, *, called: Mapping[str, str] | None = None) -> T:
    """A dataclass from nested dictionaries, strictly. `called` is what fields are called there, if not by
    their names."""
    if not isinstance(tree, dict):
        raise UserError(f"{where}: expected a mapping, got {tree!r}")
    hints = {f.name: get_type_hints(cls)[f.name] for f in dataclasses.fields(cls)}
    for key in tree:
        if key not in hints:
            raise UserError(f"{where}: unknown key '{key}'{did_you_mean(str(key), hints)}")
    names = called or {}
    values = {
        key: _convert(hints[key], value, f"{where}: {names.get(key, key)}")
        for key, value in tree.items()
    }
    try:
        return cls(**values)
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(where) else f"{where}: {message}") from error


def _model_from_tree(tree: Any, where: str) -> BackboneConfig:
    """A model of the kind that is named, a DiT if none is; or the name of a preset."""
    if isinstance(tree, str):
        if tree not in PRESETS:
            raise UserError(f"{where}: unknown preset '{tree}'{did_you_mean(tree, PRESETS)}")
        return PRESETS[tree]
    if not isinstance(tree, dict):
        raise UserError(f"{where}: expected a mapping, got {tree!r}")
    kind = tree.get("kind", DiTConfig.kind)
    if kind not in BACKBONES:
        raise UserError(f"{where}: unknown kind '{kind}'{did_you_mean(str(kind), BACKBONES)}")
    shape = {key: value for key, value in tree.items() if key != "kind"}
    return from_tree(BACKBONES[kind].config, shape, where)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint == ModelConfig:
        return _model_from_tree(value, where)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_tree(hint, value, where)
    origin = get_origin(hint)
    if origin is Literal:
        if value not in get_args(hint):
            known = [str(choice) for choice in get_args(hint)]
            raise UserError(f"{where}: '{value}' is not allowed{did_you_mean(str(value), known)}")
        return value
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:  # YAML reads 1e-3 (without a dot) as a string
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(f"{where}: expected {_IN_WORDS.get(hint, hint.__name__)}, got {value!r}")
    return value
