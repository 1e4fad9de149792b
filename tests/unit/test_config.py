"""Configurations: strict reading, recipes, and no field that nothing reads."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from xdlm import UserError, Vocab
from xdlm.config import ProcessConfig, RunConfig, dump_config, load_config, parse_config
from xdlm.noise import Gidd, Masked, Mixed, Uniform

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_and_round_trips(recipe: Path) -> None:
    read = load_config(recipe)
    assert parse_config(dump_config(read)) == read


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 5


def test_paper_defaults() -> None:
    paper = RunConfig()
    assert (paper.optim.lr, paper.optim.warmup, paper.optim.weight_decay) == (3e-4, 2500, 0)
    assert (paper.optim.beta1, paper.optim.beta2, paper.optim.clip) == (0.9, 0.999, 1.0)
    assert (paper.optim.ema, paper.train.batch, paper.optim.decay) == (0.9999, 512, 0)
    assert (paper.model.depth, paper.model.width, paper.model.heads) == (12, 768, 12)
    assert (paper.model.dropout, paper.model.time_conditioning) == (0.1, False)
    built = paper.process.build(Vocab(10, 9))
    assert isinstance(built, Mixed) and built.k == 0.1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optim: {lrr: 1}", "unknown key 'lrr'; did you mean 'lr'"),
        ("optimm: {}", "unknown key 'optimm'; did you mean 'optim'"),
        ("optim: {lr: fast}", "expected a number, got 'fast'"),
        ("train: {steps: true}", "expected a whole number, got True"),
        ("train: {steps: 1.5}", "expected a whole number"),
        ("train: {precision: float31}", "did you mean 'float32'"),
        ("model: smal", "unknown preset 'smal'; did you mean 'small'"),
        ("model: {width: 100, heads: 3}", "multiple of 2 x heads"),
        ("process: {kind: mixd}", "did you mean 'mixed'"),
        ("process: {kind: mixed, k: 1.5}", "k must lie in"),
        ("process: {kind: masked, k: 0.1}", "process.k has no meaning for kind 'masked'"),
        ("process: {kind: gidd, schedule: cosine}", "no meaning for kind 'gidd'"),
        ("process: {schedule: linear}", "unknown schedule 'linear'"),
        ("process: {schedule: cosine, power: 2}", "process.power has no meaning"),
        ("loss: {weighting: elb}", "did you mean 'elbo'"),
        ("data: {length: 1}", "data.length must be at least 2"),
        ("optim: {kind: moun}", "unknown optim.kind 'moun'; did you mean 'muon'"),
        ("{optim: {kind: muon}, train: {parallel: fsdp}}", "muon needs whole matrices"),
        ("optim: {lr: .nan}", "optim.lr must be positive and finite"),
        ("train: {seed: 99999999999}", "train.seed must lie in"),
        ("optim: {weight_decay: .nan}", "must be >= 0"),
        ("process: {schedule: polynomial, power: .nan}", "power >= 1"),
        ("process: {kind: gidd, gamma: .nan}", r"gamma must lie in \(0, 2\]"),
        ("process: {kind: gidd, p_uniform: .nan}", "p_uniform must lie"),
        ("process: {kind: mixed, k: .nan}", "k must lie in"),
        ("process: {eps: .nan}", "eps must lie in"),
        ("- a", "expected a mapping"),
        ("a: [", "is not YAML: line 1: expected the node content"),
    ],
)
def test_bad_configurations_are_named(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_config(text)


def test_yaml_floats_without_a_dot() -> None:
    assert parse_config("optim: {lr: 1e-3}").optim.lr == 1e-3


def test_model_may_be_a_preset() -> None:
    assert parse_config("model: nano").model.width == 64


def test_kinds_build_what_they_say() -> None:
    for kind, cls in (("masked", Masked), ("uniform", Uniform), ("mixed", Mixed), ("gidd", Gidd)):
        process = ProcessConfig(kind=kind)
        vocab = process.vocab(100)
        assert vocab == (Vocab(100) if kind == "uniform" else Vocab(101, 100))
        assert type(process.build(vocab)) is cls


#: By what name code that reads a section holds it, beside the section's own.
ALIASES = {"optim": {"config"}, "lora": {"config"}, "train": {"config"}, "model": {"config"}}


def test_every_field_is_read_somewhere() -> None:
    """A key that nothing reads is a lie: outside of xdlm.config, which checks them, each field must be
    read off something that holds its section (`config.optim.lr`, `data.length`, ...)."""
    read: set[tuple[str, str]] = set()
    for file in (ROOT / "src").rglob("*.py"):
        if file.parent.name == "config":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                holder = getattr(node.value, "attr", getattr(node.value, "id", ""))
                read.add((holder, node.attr))
    for section in dataclasses.fields(RunConfig):
        if section.name == "process":  # its settings reach the process by name: tested below
            continue
        cls = type(getattr(RunConfig(), section.name))
        for field in dataclasses.fields(cls):
            holders = {section.name, *ALIASES.get(section.name, ())}
            ways = {(holder, field.name) for holder in holders}
            ways |= {("self", field.name)} if section.name == "model" else set()
            if field.name == "train":  # data.train, not the section
                ways = {("data", "train")}
            assert ways & read, f"{section.name}.{field.name}"


@pytest.mark.parametrize("setting", [
    {"kind": "mixed", "k": 0.3}, {"kind": "gidd", "p_uniform": 0.3}, {"kind": "gidd", "gamma": 2.0},
    {"kind": "masked", "schedule": "cosine"}, {"kind": "masked", "eps": 0.1},
    {"kind": "masked", "schedule": "polynomial", "power": 3.0},
])  # fmt: skip
def test_every_process_setting_has_an_effect(setting: dict) -> None:
    vocab = Vocab(10, 9)
    plain = ProcessConfig(
        kind=setting["kind"], schedule="polynomial" if "power" in setting else None
    )
    changed = ProcessConfig(**setting).build(vocab).coefs(0.3)
    reference = plain.build(vocab).coefs(0.3)
    assert (changed.alpha != reference.alpha) or (changed.b_tok != reference.b_tok)
