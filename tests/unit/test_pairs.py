"""Fine-tuning on prompts with responses: prompts stay clean and do not count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_chat import templated

from xdlm import UserError, load
from xdlm.api import load_tokenizer
from xdlm.cli.train import make_trainer
from xdlm.config import load_config, parse_config
from xdlm.data import load_pairs
from xdlm.tokens import TextTokenizer
from xdlm.tokens.chat import find_template
from xdlm.training.loss import DiffusionLoss

TOKENIZER = load_tokenizer("pocket")
RECIPE = Path(__file__).parents[2] / "recipes" / "cpu-tiny.yaml"
PAIRS = [("What is it? ", "A small dog."), ("Who? ", "He."), ("Say a lot: ", "One two three four.")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    return tmp_path / "pairs.jsonl"


def test_a_row_is_prompt_response_and_ends(file: Path) -> None:
    rows = load_pairs(str(file), TOKENIZER, 24, bos=True)
    tokens, given = rows.take(range(3)), rows.given(range(3))
    for row, fixed, (prompt, response) in zip(tokens, given, PAIRS, strict=True):
        first = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]
        whole = [*first, *TOKENIZER.encode(response)]
        assert row.tolist() == whole + [TOKENIZER.eos_id] * (24 - len(whole))
        assert fixed.tolist() == [True] * len(first) + [False] * (24 - len(first))
    assert rows.n_learned([0, 2]) == int((~given[[0, 2]]).sum())


@pytest.mark.parametrize("kind", ["masked", "mixed", "uniform", "gidd"])
def test_prompts_are_never_noised_and_never_count(file: Path, tmp_path: Path, kind: str) -> None:
    config = load_config(RECIPE)
    process = parse_config(f"process: {{kind: {kind}}}").process
    config = replace(
        config, process=process,
        data=replace(config.data, train=str(file), pairs=True, length=24, val=None),
        train=replace(config.train, out=str(tmp_path / "run"), steps=2, batch=8, micro_batch=8,
                      eval_every=0, save_every=0, device="cpu"),
    )  # fmt: skip
    trainer = make_trainer(config, TOKENIZER)
    ((batch, _),) = trainer.loader.batches(0)
    assert trainer.loader.n_learned(0) == int((~batch.given).sum()) < batch.tokens.numel()
    seen = []
    trunk = trainer.model.trunk

    def look(z, t, label=None):
        seen.append(z)
        return trunk(z, t, label)

    trainer.model.trunk = look
    sums = trainer.loss(trainer.model, batch, seed=0, step=0, global_batch=8)
    del trainer.model.trunk
    (z,) = seen
    assert torch.equal(z[batch.given], batch.tokens[batch.given])
    assert not torch.equal(z, batch.tokens)
    # Other prompts' tokens would change the trunk's input; the loss's own sum has no term of theirs.
    loss = DiffusionLoss(trainer.process, kept_rows=1.0, impl="eager")
    everything = loss(trainer.model, batch, seed=0, step=0, global_batch=8)
    assert everything.rows <= int((~batch.given).sum()) and sums.rows <= everything.rows
    assert trainer.run()


def test_bad_pairs_are_named(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pair 1: prompt, response and end have"):
        load_pairs(str(file), TOKENIZER, 6)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(UserError, match="record 1: expected a string field 'response'"):
        load_pairs(str(tmp_path / "bad.jsonl"), TOKENIZER, 6)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match="pairs are records"):
        load_pairs(str(tmp_path / "a.txt"), TOKENIZER, 6)
    for text, says in (
        ("data: {pairs: true, frame: true}", "has no frame"),
        ("{data: {pairs: true}, process: {kind: autoregressive}}", "data.pairs has no meaning"),
    ):
        with pytest.raises(UserError, match=says):
            parse_config(text).refuse_idle()


# --- Conversations -----------------------------------------------------------------------------

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "He."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "At sea."},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    """The bundled one with a chat template."""
    pytest.importorskip("transformers")
    (tmp_path / "tokens").mkdir()
    return TextTokenizer.load(templated(tmp_path / "tokens"))


def talks(folder: Path, *records: object) -> str:
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, records)))
    return str(folder / "talks.jsonl")


def test_every_answer_of_a_conversation_is_a_pair(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    plain = {"prompt": "Say: ", "response": "Yes."}
    file = talks(tmp_path, {"messages": TALK}, {**plain, "messages": None})
    end = "<|endoftext|>"
    first = f"<system>Be brief.{end}<user>Who?{end}<assistant>"
    second = f"{first}He.{end}<user>Where?{end}<assistant>"
    expected = [(first, f"He.{end}"), (second, f"At sea.{end}"), ("Say: ", "Yes.")]
    rows = load_pairs(file, tokenizer, 80, bos=True)
    assert len(rows) == 3
    for row, fixed, (prompt, answer) in zip(
        rows.take(range(3)), rows.given(range(3)), expected, strict=True
    ):
        given = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        learned = tokenizer.encode(answer)
        assert row.tolist()[: int(fixed.sum())] == given
        rest = row.tolist()[len(given) :]
        assert rest == learned + [tokenizer.eos_id] * (80 - len(given) - len(learned))


def test_a_template_that_begins_texts_is_not_begun_twice(tmp_path: Path) -> None:
    folder = templated(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "<|endoftext|>" + config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TextTokenizer.load(folder)
    rows = load_pairs(talks(tmp_path, {"messages": TALK}), tokenizer, 80, bos=True)
    assert rows.take([0])[0, :2].tolist() == [
        tokenizer.bos_id,
        *tokenizer.encode("<system>Be brief.")[:1],
    ]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("Hello", "record 1: messages are a list"),
        ([{"role": "user"}], "record 1: messages are a list"),
        ([{"role": "user", "content": "Hello"}], "record 1: there is no message of the assistant"),
        ([{"role": "stranger", "content": "x"}, TALK[2]], "record 1: .* refuses these messages"),
    ],
)
def test_bad_conversations_are_named(tmp_path: Path, messages: object, says: str) -> None:
    folder = templated(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    refuse = "{% if messages[0].role == 'stranger' %}{{ raise_exception('who?') }}{% endif %}"
    config["chat_template"] = refuse + config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=says):
        load_pairs(talks(tmp_path, {"messages": messages}), TextTokenizer.load(folder), 80)


def test_messages_need_a_template(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"record 1: messages need a chat template.*data\.tokenizer"
    ):
        load_pairs(talks(tmp_path, {"messages": TALK}), TOKENIZER, 80)


def test_answers_that_do_not_follow_their_prompts_are_refused(tmp_path: Path) -> None:
    folder = templated(tmp_path)
    odd = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": odd}))
    with pytest.raises(UserError, match="does not put an answer behind"):
        load_pairs(talks(tmp_path, {"messages": TALK}), TextTokenizer.load(folder), 80)


def test_the_template_stays_with_the_model(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """Through training, export and publishing: a model that was taught a template answers by it."""
    config = load_config(RECIPE)
    config = replace(
        config,
        data=replace(config.data, train=talks(tmp_path, {"messages": TALK}), pairs=True, length=80,
                     val=None, tokenizer=str(tmp_path / "tokens")),
        train=replace(config.train, out=str(tmp_path / "run"), steps=1, batch=2, micro_batch=2,
                      eval_every=0, save_every=0, device="cpu"),
    )  # fmt: skip
    assert make_trainer(config, tokenizer).run()
    run = load(tmp_path / "run", device="cpu")
    run.save(tmp_path / "saved")
    run.publish(tmp_path / "hub")
    wanted = find_template(tokenizer).render(TALK[:2])
    for name in ("run", "saved", "hub"):
        model = load(tmp_path / name, device="cpu")
        assert find_template(model.tokenizer).render(TALK[:2]) == wanted
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path / "hub")
    assert (
        theirs.apply_chat_template(TALK[:2], tokenize=False, add_generation_prompt=True) == wanted
    )
    load("pocket", device="cpu").publish(tmp_path / "plain")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert theirs.encode("It was a") == TOKENIZER.encode("It was a")
    assert theirs.eos_token_id == TOKENIZER.eos_id


def test_a_model_learns_responses(file: Path, tmp_path: Path) -> None:
    """Trained on three pairs, it answers with theirs; the prompts it was never taught."""
    config = load_config(RECIPE)
    config = replace(
        config, data=replace(config.data, train=str(file), pairs=True, length=24, val=None),
        optim=replace(config.optim, warmup=0),
        train=replace(config.train, out=str(tmp_path / "run"), steps=60, batch=12, micro_batch=12,
                      eval_every=0, save_every=0, device="cpu"),
    )  # fmt: skip
    trainer = make_trainer(config, TOKENIZER)

    def bound() -> float:
        ((batch, _),) = trainer.loader.batches(0)
        with torch.no_grad():
            sums = trainer.loss(trainer.model.eval(), batch, seed=0, step=0, global_batch=12)
        return float(sums.elbo) / trainer.loader.n_learned(0)

    before = bound()
    trainer.run()
    assert bound() < 0.3 * before
