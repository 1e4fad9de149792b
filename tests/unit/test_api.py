"""The Model object, under every noise type."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from xdlm import Model, UserError, load
from xdlm.bundled import NAMES, bundled_folder
from xdlm.config import DataConfig, ProcessConfig, RunConfig, TrainConfig, load_config
from xdlm.models import PRESETS, build_denoiser
from xdlm.sampling import Change

KINDS = ["masked", "uniform", "mixed", "gidd"]


def model_of(kind: str) -> Model:
    """An untrained model with the bundled tokenizer, its head shaken so that it predicts something."""
    tokenizer = load("pocket", device="cpu").tokenizer
    process = ProcessConfig(kind=kind)
    vocab = process.vocab(tokenizer.size)
    torch.manual_seed(0)
    denoiser = build_denoiser(PRESETS["nano"], vocab.size).eval()
    torch.nn.init.normal_(denoiser.head_weight)
    config = RunConfig(process=process, model=PRESETS["nano"], data=DataConfig(length=24))
    return Model(denoiser, process.build(vocab), tokenizer, config, "raw", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_stays_in_front(kind: str) -> None:
    model = model_of(kind)
    prompt = "It was a dark night"
    drawn = model.sample(3, steps=4, prompt=prompt, seed=1)
    ids = model.tokenizer.encode(prompt)
    assert drawn.tokens.shape == (3, 24)
    for frame in drawn.trajectory.frames:
        assert frame[:, : len(ids)].tolist() == [ids] * 3
    assert all(text.startswith(prompt) for text in drawn.text)
    assert len(set(drawn.text)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_infilling_keeps_the_rest(kind: str) -> None:
    model = model_of(kind)
    filled = model.infill("The cat <mask:4> the<mask> mat.", n=2, steps=4)
    pieces = [model.tokenizer.encode(text) for text in ("The cat", " the", " mat.")]
    first, second, third = map(len, pieces)
    for row in filled.tokens.tolist():
        assert row[:first] == pieces[0]
        assert row[first + 4 : first + 4 + second] == pieces[1]
        assert row[-third:] == pieces[2]
        assert len(row) == first + 4 + second + 1 + third


def test_many_samples_are_those_of_small_batches() -> None:
    model = load("pocket", device="cpu")
    together = model.sample(5, steps=2, length=8, seed=3)
    steps: list[tuple[int, int]] = []
    apart = model.sample(
        5, steps=2, length=8, seed=3, batch_tokens=2 * 8 + 7, on_step=lambda *s: steps.append(s)
    )
    assert torch.equal(together.tokens, apart.tokens)
    assert torch.equal(together.trajectory.frames, apart.trajectory.frames)
    assert steps[-1] == (9, 9) and len(steps) == 9


@pytest.mark.parametrize("kind", ["masked", "mixed", "gidd"])
def test_confidence_decoding_fills_every_mask(kind: str) -> None:
    """Prompts and templates, in blocks; only uniform noise has tokens rewritten."""
    model = model_of(kind)
    how = {"sampler": "confidence", "steps": 16, "block_length": 8}
    drawn = model.sample(2, prompt="It was", new_tokens=20, seed=1, **how)
    ids = model.tokenizer.encode("It was")
    assert drawn.tokens[:, : len(ids)].tolist() == [ids] * 2
    assert drawn.tokens.shape == (2, len(ids) + 20) and drawn.nfe <= 16
    assert not (drawn.tokens == model.process.vocab.mask_id).any()
    rewritten = sum(drawn.trajectory.counts()[Change.REFINE])
    assert (rewritten > 0) == (kind != "masked")
    as_llada = model.mixed(0).sample(2, prompt="It was", new_tokens=20, seed=1, **how)
    assert sum(as_llada.trajectory.counts()[Change.REFINE]) == 0
    filled = model.infill("The cat <mask:4> the<mask> mat.", n=2, sampler="confidence", steps=5)
    assert all(text.startswith("The cat") and text.endswith(" mat.") for text in filled.text)


@pytest.mark.parametrize("sampler", ["ancestral", "confidence"])
def test_completions_do_not_depend_on_each_other(sampler: str) -> None:
    """Prompts of unequal length, in any company, and in the order in which they were given."""
    model = load("pocket", device="cpu")
    prompts = ["The", "It was a dark night, and", "", "He", "When I came down to"]
    how = {"new_tokens": 12, "steps": 6, "seed": 2, "sampler": sampler}
    together = model.complete(prompts, **how)
    assert together == model.complete(prompts, batch_tokens=1, **how)
    for i in (0, 3):
        assert [together[i]] == model.complete([prompts[i]], index=[i], **how)
    ids = [model.tokenizer.encode(prompt) for prompt in prompts]
    assert together == model.complete(ids, **how)
    assert all(len(c.tokens) == 12 or c.stopped for c in together)
    assert model.complete([], **how) == []


@pytest.mark.parametrize("sampler", ["ancestral", "confidence"])
def test_a_text_ends_where_the_model_ends_it(sampler: str) -> None:
    model = model_of("masked")
    eos = model.tokenizer.eos_id
    torch.nn.init.zeros_(model.denoiser.head_weight)
    bias = model.denoiser.head_bias.data.fill_(-50.0)
    bias[eos], bias[300] = 0.0, -0.5
    drawn = model.sample(8, steps=16, length=16, stop=True, sampler=sampler, prompt="It")
    whole = model.sample(8, steps=16, length=16, sampler=sampler, prompt="It")
    assert any(drawn.stopped) and whole.stopped == [False] * 8
    for row, text, stopped in zip(drawn.tokens.tolist(), drawn.text, drawn.stopped, strict=True):
        end = row.index(eos) if eos in row else len(row)
        assert stopped == (end < len(row)) and text == model.tokenizer.decode(row[:end])
    for completion in model.complete(["It"] * 8, new_tokens=14, steps=14, sampler=sampler):
        assert eos not in completion.tokens and completion.stopped == (len(completion.tokens) < 14)


def test_settings_of_the_other_sampler_are_refused() -> None:
    model = model_of("mixed")
    for how, says in (
        ({"sampler": "confident"}, "did you mean 'confidence'"),
        ({"sampler": "confidence", "impl": "dense"}, "impl has no meaning for the confidence"),
        ({"block_length": 8}, "block_length has no meaning for the ancestral"),
        ({"stepps": 8}, "unknown setting 'stepps'; did you mean 'steps'"),
        ({"length": 8, "new_tokens": 4}, "not both"),
        ({"new_tokens": 0}, "new_tokens must lie in"),
    ):
        with pytest.raises(UserError, match=says):
            model.sample(1, **how)
    with pytest.raises(UserError, match="this model's noise has none"):
        model_of("uniform").sample(1, sampler="confidence")
    with pytest.raises(UserError, match="a list of prompts"):
        model.complete("text")
    for ids in ([[10**6]], [[5, -1]]):
        with pytest.raises(UserError, match=r"is no token: they lie in 0\.\.2048"):
            model.complete(ids, new_tokens=2)
    with pytest.raises(UserError, match="index numbers 1 rows, and there are 2"):
        model.complete(["a", "b"], new_tokens=2, index=[0])


def test_arguments_that_are_none_get_one_line() -> None:
    model = model_of("mixed")
    for how, says in (
        ({"steps": 1.5}, "steps must be a whole number, got 1.5"),
        ({"steps": "8"}, "steps must be a whole number, got '8'"),
        ({"n": 1.5}, "n must be a whole number"),
        ({"length": 8.0}, "length must be a whole number"),
        ({"new_tokens": "8"}, "new_tokens must be a whole number"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"seed": 2**64}, r"seed must lie in 0\.\.2\^63-1, got 18446744073709551616"),
        ({"seed": -1}, "seed must lie in"),
        ({"seed": -1, "banned": [0]}, "seed must lie in"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"top_p": None}, "top_p must be a number, got None"),
        ({"sampler": "confidence", "block_length": 1.5}, "block_length must be a whole number"),
        ({"sampler": "confidence", "guidance": "2"}, "guidance must be a number"),
        (
            {"prompt": ["a", "b"]},
            r"a prompt is one text, got \['a', 'b'\]; complete\(\[\.\.\.\]\) takes",
        ),
    ):
        with pytest.raises(UserError, match=says):
            model.sample(**{"steps": 2, "length": None if "new_tokens" in how else 8, **how})
    with pytest.raises(UserError, match=r"a template is one text, got \['a"):
        model.infill(["a <mask>", "b <mask>"])  # type: ignore[arg-type]
    for prompts, says in ((3, "a list of prompts, got 3"), ([3], "a text or a list of tokens")):
        with pytest.raises(UserError, match=says):
            model.complete(prompts, new_tokens=2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="seed must lie in"):
        model.complete(["a"], new_tokens=2, seed=-1)
    for texts, says in (
        ([1], "a list of texts, and 1 is not a text"), (None, "a list of texts, got None"),
        ([""], "holds no text"), ([" \n", ""], "holds no text"), ([], "holds no text"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            model.perplexity(texts)  # type: ignore[arg-type]
    for how, says in (({"seed": 1.5}, "seed must be"), ({"draws": 1.5}, "draws must be")):
        with pytest.raises(UserError, match=says):
            model.perplexity(["It was"], **how)
    for name in (None, 3):
        with pytest.raises(UserError, match=f"a name, such as 'pocket', or a path, got {name}"):
            load(name)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="k must be a number, got 'a'"):
        model.mixed("a")  # type: ignore[arg-type]


def test_rules_say_with_which_settings_they_work() -> None:
    model = model_of("mixed")
    for how, says in (
        ({"impl": "dense"}, "banned and blanks work with impl='thinned' only, not with 'dense'"),
        ({"sampler": "confidence", "refresh": 2}, "banned and blanks work without refresh"),
    ):
        with pytest.raises(UserError, match=says):
            model.sample(1, steps=2, length=8, banned=[0], **how)


def test_a_result_is_shown_in_a_line() -> None:
    drawn = model_of("masked").sample(5, steps=2, length=24)
    assert repr(drawn).startswith("TextSample('") and "\n" not in repr(drawn)
    assert repr(drawn).endswith(f"', and 2 more; tokens [5, 24], nfe={drawn.nfe})")
    assert len(repr(drawn)) < 400
    short = replace(drawn, text=["It was.", "a\nb " * 99], tokens=drawn.tokens[:2])
    assert repr(short) == (
        f"TextSample('It was.', '{('a b ' * 15)}...'; tokens [2, 24], nfe={drawn.nfe})"
    )


def test_rows_beyond_those_of_training_are_warned_of_once() -> None:
    """Not where a model is from elsewhere, and its rows perhaps were longer."""
    model = replace(load("pocket", device="cpu"), name="mine")
    says = "mine was trained on rows of 128 tokens: quality drops beyond them"
    with pytest.warns(UserWarning, match=f"^{says}$") as seen:
        model.sample(1, steps=1, length=129)
    assert len(seen) == 1 and seen[0].filename == __file__
    with pytest.warns(UserWarning, match="^another was trained on rows of 128 tokens"):
        replace(model, name="another").complete([[5] * 100], new_tokens=30, steps=1)
    elsewhere = replace(model, config=replace(model.config, train=TrainConfig()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.sample(1, steps=1, length=130)  # said already
        model.infill("<mask:129>", steps=1)
        model.sample(1, steps=1)
        model.complete([[5] * 100], new_tokens=28, steps=1)
        assert [len(c.tokens) for c in model.complete([[5] * 100, [5]], steps=1, stop=False)] == [
            28,
            127,
        ]
        for other in (elsewhere, replace(model, step=0)):
            other.sample(1, steps=1, length=131)


def test_packing_is_that_of_training() -> None:
    model = model_of("masked")
    plain = model.pack(["one two"]).n_tokens
    for change, extra in (({"eos": False}, -1), ({"bos": True}, 1)):
        data = replace(model.config.data, **change)
        other = replace(model, config=replace(model.config, data=data))
        assert other.pack(["one two"]).n_tokens == plain + extra


def test_perplexity_of_the_bundled_model() -> None:
    """English is likelier than the same words shuffled, by far more than the error."""
    model = load("pocket", device="cpu")
    text = (
        "When I came down to breakfast the next morning she was already sitting at the table, "
        "and she looked up at me with a smile, and asked me whether I had slept well."
    )
    words = text.split()
    shuffled = " ".join(words[i] for i in torch.randperm(
        len(words), generator=torch.Generator().manual_seed(0)).tolist())  # fmt: skip
    good, bad = model.perplexity([text], draws=32), model.perplexity([shuffled], draws=32)
    assert 0 < good.stderr < good.value
    assert good.nats_per_token + 2 * good.nats_stderr < bad.nats_per_token - 2 * bad.nats_stderr
    with pytest.raises(UserError, match="a list of texts"):
        model.perplexity("text")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mdlm", "xdlm", "udlm", "judge"])
def test_a_bundled_model_is_that_of_its_recipe(kind: str) -> None:
    """Which does not say how many minutes there were."""
    model = load(f"pocket-{kind}", device="cpu")
    recipe = load_config(Path(__file__).parents[2] / "recipes" / "pocket" / f"{kind}.yaml")
    train = replace(model.config.train, minutes=recipe.train.minutes)
    assert replace(model.config, train=train) == recipe and model.step == recipe.train.steps
    folder = bundled_folder(f"pocket-{kind}")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8e6


def test_the_bundled_models_differ_in_noise_alone() -> None:
    """One of them goes by a short name too. The judge's loss has no weights."""
    one, *others = (load(name, device="cpu").config for name in NAMES)
    assert load("pocket-xdlm", device="cpu").config == one
    for config in others:
        train = replace(config.train, out=one.train.out, minutes=one.train.minutes)
        loss = one.loss if config.process.is_autoregressive else config.loss
        assert replace(config, process=one.process, loss=loss, train=train) == one


def test_a_path_is_a_folder_and_never_a_bundled_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket").mkdir()
    with pytest.raises(UserError, match=r"no checkpoint\.json"):
        load(Path("pocket"))
    assert load("pocket", device="cpu").step > 0


def test_the_trajectory_is_optional() -> None:
    model = load("pocket", device="cpu")
    with_it = model.sample(1, steps=2, length=8)
    without = model.sample(1, steps=2, length=8, trajectory=False)
    assert without.trajectory is None and with_it.trajectory.steps == 3
    assert with_it.text == without.text


def test_unknown_models_are_named(tmp_path) -> None:
    with pytest.raises(UserError, match="unknown weights 'emma'"):
        load("pocket", weights="emma")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="did you mean 'pocket'"):
        load("pockt")
    with pytest.raises(UserError, match=r"no checkpoint\.json"):
        load(tmp_path)


def test_a_masked_model_is_sampled_as_a_mixed_one() -> None:
    """Only the reverse process changes: k = 0 is the masked one, and k > 0 goes back on its tokens."""
    model = model_of("masked")
    same = model.mixed(0.0).sample(2, steps=6, length=24, seed=1)
    assert torch.equal(same.tokens, model.sample(2, steps=6, length=24, seed=1).tokens)
    path = model.mixed(0.5).sample(2, steps=6, length=24, seed=1).trajectory
    assert sum(path.counts()[Change.REFINE]) > 0 and sum(path.counts()[Change.REMASK]) > 0
    with pytest.raises(UserError, match="has no mask"):
        model_of("uniform").mixed(0.1)
    with pytest.raises(UserError, match="k"):
        model.mixed(1.5)


def test_the_trunk_may_run_in_bfloat16() -> None:
    half, full = (load("pocket", device="cpu", precision=p) for p in ("bfloat16", "float32"))
    assert half.denoiser.head_weight.dtype == torch.bfloat16
    text = ["It was a dark night, and the rain fell in torrents upon the roof of the house."]
    a, b = (model.perplexity(text).nats_per_token for model in (half, full))
    assert a == pytest.approx(b, rel=0.01)
    assert len(half.sample(2, steps=4, length=16).text) == 2
    with pytest.raises(UserError, match="unknown precision 'float23'"):
        load("pocket", precision="float23")  # type: ignore[arg-type]
