"""The thinned sampler against the dense posterior, frozen positions, filters, trajectories."""

from __future__ import annotations

import math
import re

import pytest
import torch
from laws import steps_off
from processes import PROCESSES, N, ordinary_tokens, probs_of, random_prediction
from torch import Tensor, nn

from xdlm import UserError, Vocab
from xdlm.models import PRESETS, Denoiser, DiT
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform
from xdlm.ops.gather import ordered_rows
from xdlm.sampling import (
    Change,
    Filter,
    SamplerConfig,
    Trajectory,
    ancestral,
    ancestral_step,
    dense_step,
    parse_template,
    sample,
    time_grid,
)
from xdlm.sampling.ancestral import mostly_over_a_quarter, part_of
from xdlm.sampling.dense import exponential_noise

every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())


class Oracle(Denoiser):
    """A denoiser given by a function from tokens [B, L] to log-probabilities [B, L, V]."""

    def __init__(self, log_probs, vocab_size: int) -> None:
        super().__init__()
        self.log_probs = log_probs
        self.eye = nn.Parameter(torch.eye(vocab_size))
        self.calls = 0

    def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        self.calls += 1
        return self.log_probs(z, t)

    head_weight = property(lambda self: self.eye)
    head_bias = property(lambda self: None)


def frequencies_match(drawn: Tensor, law: Tensor, sigmas: float = 5.0) -> bool:
    n = drawn.numel()
    seen = torch.bincount(drawn.flatten(), minlength=len(law)).double() / n
    # The added 3/n allows a token of tiny probability to turn up by chance.
    return bool(((seen - law).abs() <= sigmas * (law * (1 - law) / n).sqrt() + 3 / n).all())


@every_process
@pytest.mark.parametrize("step", [ancestral_step, dense_step], ids=["thinned", "dense"])
@pytest.mark.parametrize(("s", "t"), [(0.4, 0.6), (0.0, 0.3)])
def test_step_frequencies_match_the_posterior(process: NoiseProcess, step, s, t) -> None:
    draws = 30_000
    logits = random_prediction(process, seed=8).float()
    probs = probs_of(process, logits.double())
    tokens = [ordinary_tokens(process)[2], *process.special_ids]
    for z in tokens:
        z_BL = torch.full((1, draws), z)
        law = process.posterior(probs.view(1, 1, N), torch.tensor([[z]]), s, t)[0, 0]
        drawn = step(
            process, logits.expand(1, draws, N), z_BL, s, t,
            generator=torch.Generator().manual_seed(z),
        )  # fmt: skip
        assert frequencies_match(drawn, law)


@every_process
@pytest.mark.parametrize("step", [ancestral_step, dense_step], ids=["thinned", "dense"])
def test_positions_may_have_times_of_their_own(process: NoiseProcess, step) -> None:
    draws, z = 20_000, ordinary_tokens(process)[2]
    logits = random_prediction(process, seed=8).float()
    probs = probs_of(process, logits.double()).view(1, 1, N)
    s, t = torch.tensor([[0.0, 0.2, 0.5]]), torch.tensor([[0.3, 0.4, 0.9]])
    drawn = step(
        process, logits.expand(draws, 3, N), torch.full((draws, 3), z), s.expand(draws, -1),
        t.expand(draws, -1), generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for i in range(3):
        law = process.posterior(probs, torch.tensor([[z]]), s[:, i], t[:, i])[0, 0]
        assert frequencies_match(drawn[:, i], law)


@every_process
def test_whole_run_follows_the_law_in_every_way_to_draw(process: NoiseProcess) -> None:
    """Every leg of a real run, the one from pure noise included."""
    logits = random_prediction(process, seed=9).float()
    oracle = Oracle(lambda z, t: logits.expand(*z.shape, N), N)
    results = {}
    for impl in ("thinned", "dense", "gumbel", "starved"):
        config = SamplerConfig(steps=3, impl=impl)
        results[impl] = sample(
            oracle, process, batch=40, length=500, config=config, seed=5, record=True
        )
    probs = probs_of(process, logits.double())
    for result in results.values():
        assert steps_off(process, probs, 3, result.trajectory.frames) < 4
        # Independent positions and a constant prediction: the marginal at s is f_s(probs, .).
        for leg, frame in zip(
            time_grid(process, 3, torch.zeros(1)), result.trajectory.frames[1:], strict=True
        ):
            law = leg.at_s.alpha[0] * probs + leg.at_s.b.dense(N)[0]
            assert frequencies_match(frame, law)


@pytest.mark.parametrize("kind", ["masked", "mixed", "uniform", "gidd"])
def test_oracle_samples_a_known_language(kind: str) -> None:
    """Words of length 2 with law P(a) P(b | a): the exact conditional gives back the law.

    The oracle knows the noise: given the other token it returns the law of this one, mixed over what
    the other's clean token may have been. With many steps the samples follow P.
    """
    generator = torch.Generator().manual_seed(0)
    n_tokens = 4
    joint = torch.rand(n_tokens, n_tokens, generator=generator, dtype=torch.float64) ** 3
    joint /= joint.sum()
    mask = None if kind == "uniform" else n_tokens
    vocab = Vocab(n_tokens + (mask is not None), mask)
    process: NoiseProcess = {
        "masked": Masked, "mixed": Mixed, "uniform": Uniform, "gidd": Gidd,
    }[kind](vocab)  # fmt: skip

    def log_probs(z: Tensor, t: Tensor) -> Tensor:
        time = t.double().clamp(*process.time_range)
        coefs = process.coefs(time)
        tokens = torch.arange(n_tokens).expand(len(z), -1)
        out = []
        for own, table in ((0, joint), (1, joint.T)):
            other = z[:, 1 - own, None].expand(-1, n_tokens)
            likelihood = coefs.of((tokens == other).double(), other)
            out.append(likelihood @ table.T)
        law = torch.stack(out, 1)
        law = torch.nn.functional.pad(law, (0, vocab.size - n_tokens))
        return (law / law.sum(-1, keepdim=True)).log().float().clamp_min(-80)

    drawn = sample(
        Oracle(log_probs, vocab.size), process, batch=20_000, length=2,
        config=SamplerConfig(steps=200), seed=1,
    ).tokens  # fmt: skip
    words = drawn[:, 0] * n_tokens + drawn[:, 1]
    seen = torch.bincount(words, minlength=n_tokens**2).double() / len(words)
    # Total variation: the noise floor of 20,000 draws over 16 words is about 0.01.
    assert 0.5 * (seen - joint.flatten()).abs().sum() < 0.02


@every_process
@pytest.mark.parametrize("impl", ["thinned", "dense", "gumbel", "starved"])
def test_frozen_positions_never_change(process: NoiseProcess, impl: str) -> None:
    generator = torch.Generator().manual_seed(3)
    given = torch.tensor(ordinary_tokens(process))[
        torch.randint(0, 8, (3, 10), generator=generator)
    ]
    frozen = torch.rand(3, 10, generator=generator) < 0.5
    model = DiT(PRESETS["nano"], N)
    nn.init.normal_(model.out.weight)
    result = sample(
        model, process, batch=3, length=10, config=SamplerConfig(steps=6, impl=impl), seed=0,
        given=given, frozen=frozen, record=True,
    )  # fmt: skip
    for frame in result.trajectory.frames:
        assert torch.equal(frame[frozen], given[frozen])
    assert not torch.isin(result.tokens, torch.tensor(process.special_ids, dtype=torch.int64)).any()


def test_published_noise_has_a_smallest_value() -> None:
    """Which is why rare tokens never win. Of so many exact draws one would be smaller, 98 times of 100."""
    noise = exponential_noise(torch.empty(1 << 26), torch.Generator().manual_seed(0))
    assert noise.min() >= 2.0**-24 and noise.double().mean() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("impl", ["thinned", "dense", "gumbel", "starved"])
@pytest.mark.parametrize("batch", [0, 2])
def test_no_sequences_and_models_of_float64(impl: str, batch: int) -> None:
    model = DiT(PRESETS["nano"], N).double()
    config = SamplerConfig(steps=3, impl=impl)
    drawn = sample(model, Mixed(Vocab(N, 4)), batch=batch, length=5, config=config, record=True)
    assert drawn.tokens.shape == (batch, 5)


def test_sequences_that_need_nothing_skip_the_model() -> None:
    """With more steps than tokens many steps touch nobody; NFE says so, per sequence."""
    process = Masked(Vocab(N, 4))
    oracle = Oracle(lambda z, t: torch.zeros(*z.shape, N), N)
    result = sample(oracle, process, batch=3, length=4, config=SamplerConfig(steps=100), seed=0)
    assert result.nfe.max() <= 4 and oracle.calls <= 12
    assert result.head_rows == 12  # each masked token is drawn once
    dense = sample(
        oracle, process, batch=3, length=4, config=SamplerConfig(steps=100, impl="dense"), seed=0
    )
    assert (dense.nfe == 101).all()


def test_few_steps_touch_few_rows() -> None:
    """XDLM, 32 steps, with a model that knows nothing: under a fifth of the rows reach the head."""
    process = Mixed(Vocab(1000, 999), k=0.1)
    oracle = Oracle(lambda z, t: torch.zeros(*z.shape, 1000), 1000)
    config = SamplerConfig(steps=32)
    result = sample(oracle, process, batch=4, length=256, config=config, seed=0)
    assert result.head_rows < 0.2 * 33 * 4 * 256


def test_samples_do_not_depend_on_the_batch() -> None:
    process = Mixed(Vocab(N, 4), k=0.3)
    logits = random_prediction(process, seed=1).float()
    oracle = Oracle(lambda z, t: logits.expand(*z.shape, N), N)
    args = {"length": 20, "config": SamplerConfig(steps=8), "seed": 4}
    whole = sample(oracle, process, batch=6, **args).tokens
    parts = [
        sample(oracle, process, batch=2, index=torch.arange(i, i + 2), **args).tokens
        for i in (0, 2, 4)
    ]
    assert torch.equal(whole, torch.cat(parts))


def test_argmax_denoise_and_zero_temperature() -> None:
    process = Masked(Vocab(N, 4))
    logits = torch.zeros(N)
    logits[7] = 1.0
    oracle = Oracle(lambda z, t: logits.expand(*z.shape, N), N)
    cold = SamplerConfig(steps=2, filter=Filter(temperature=0.0))
    assert (sample(oracle, process, batch=2, length=50, config=cold).tokens == 7).all()
    result = sample(
        oracle, process, batch=2, length=5000, config=SamplerConfig(steps=1, last="argmax"),
        record=True,
    )  # fmt: skip
    left_for_the_end = result.trajectory.frames[-2] == 4
    assert left_for_the_end.sum() > 3
    assert (result.tokens[left_for_the_end] == 7).all()
    assert (result.tokens != 7).any()


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in (
        (1e-300, 1),
        (1e-40, 1),
        (0.4, 1),
        (0.5, 1),
        (0.6, 2),
        (0.81, 3),
        (0.96, 4),
        (1.0, 4),
    ):
        assert Filter(top_p=top_p)(logits).isfinite().sum() == kept
    torch.testing.assert_close(Filter(temperature=0.5)(logits), 2 * logits)


def test_a_nucleus_of_coarse_logits_is_that_of_the_same_numbers() -> None:
    """Added up in bfloat16, many small probabilities would never reach top_p."""
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, expected = (Filter(0.9, 0.95)(each) for each in (logits, logits.float()))
    assert torch.equal(found.isfinite(), expected.isfinite()) and not expected.isfinite().all()


@pytest.mark.parametrize(
    "build",
    [
        lambda: Filter(top_p=0.0),
        lambda: Filter(temperature=-1),
        lambda: SamplerConfig(steps=0),
        lambda: SamplerConfig(impl="thin"),  # type: ignore[arg-type]
    ],
)
def test_bad_sampler_settings(build) -> None:
    with pytest.raises(UserError):
        build()


def test_model_is_told_the_time_and_the_label() -> None:
    process, seen = Mixed(Vocab(N, 4), k=0.3), []

    class Recorder(Oracle):
        n_classes = 10

        def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
            seen.append((len(z), t.tolist(), label.tolist()))
            return torch.zeros(*z.shape, N)

    label = torch.tensor([3, 8])
    sample(
        Recorder(None, N), process, batch=2, length=400, config=SamplerConfig(steps=4), label=label
    )
    times = [1.0, 0.75025, 0.5005, 0.25075, 0.001]
    assert [labels for _, _, labels in seen] == [[3, 8]] * 5
    for (_, told, _), time in zip(seen, times, strict=True):
        assert told == pytest.approx([time, time])


def test_parts_of_a_batch_have_few_sizes() -> None:
    for whole in (1, 2, 3, 4, 7, 32, 100):
        sizes = [part_of(whole, count) for count in range(whole + 1)]
        assert sizes[0] == 0 and len({*sizes}) <= 5
        for count, size in enumerate(sizes):
            assert (size is None) == (4 * count > whole)
            assert size is None or count <= size <= whole // 4


def test_nobody_looks_where_more_than_a_quarter_is_mostly_busy() -> None:
    """Against the binomial law itself: never where a quarter is likelier than e^-4, and not much later."""
    for whole in (1, 2, 3, 4, 7, 32, 100):
        for draws in (0.1, 0.5, 1.0, 1.5, 2.0, 4.0, 10.0, 21.0):
            busy = -math.expm1(-draws)
            chance = sum(
                math.comb(whole, n) * busy**n * (1 - busy) ** (whole - n)
                for n in range(whole // 4 + 1)
            )
            mostly = mostly_over_a_quarter(whole, draws)
            assert chance <= math.exp(-4) if mostly else chance > math.exp(-7)
    assert not mostly_over_a_quarter(0, 5.0)


@pytest.mark.parametrize("process", [Masked(Vocab(12, 11)), Mixed(Vocab(12, 11), k=0.1)])
def test_a_gpu_is_not_made_to_wait_between_steps(monkeypatch, process) -> None:
    """As many steps as tokens: each draws a token a sequence, as 1,024 do at the paper's length."""
    looks = []
    monkeypatch.setattr(ancestral, "_on_gpu", lambda _: True)
    monkeypatch.setattr(
        ancestral, "ordered_rows", lambda mask: looks.append(mask) or ordered_rows(mask)
    )
    oracle = Oracle(lambda z, t: torch.zeros(*z.shape, 12), 12)
    sample(oracle, process, batch=32, length=128, config=SamplerConfig(steps=128))
    assert len(looks) == 1  # the final denoise, which most sequences may not need


@pytest.mark.parametrize(
    "process", [Masked(Vocab(12, 11)), Mixed(Vocab(12, 11), k=0.3), Uniform(Vocab(12))]
)
def test_sequences_that_fill_up_a_part_change_nothing(monkeypatch, process) -> None:
    """As on a GPU, where few sizes of batches are run: with many steps few sequences move in each."""
    torch.manual_seed(0)
    model = DiT(PRESETS["nano"], 12).eval()
    torch.nn.init.normal_(model.out.weight, std=0.5)
    config, sizes, found, trunk = SamplerConfig(steps=60), set(), [], model.trunk
    model.trunk = lambda z, t, label=None: sizes.add(len(z)) or trunk(z, t, label)
    for on_gpu in (False, True):
        monkeypatch.setattr(ancestral, "_on_gpu", lambda _, there=on_gpu: there)
        sizes.clear()
        found.append(sample(model, process, batch=16, length=4, config=config, seed=1).tokens)
    assert torch.equal(*found)
    assert sizes <= {1, 2, 4, 16} and len(sizes) > 1


def test_labels_follow_the_sequences_that_are_evaluated() -> None:
    """Short sequences and many steps: mostly one of the two is evaluated, with its own label."""
    process, seen = Masked(Vocab(N, 4)), []

    class Recorder(Oracle):
        n_classes = 10

        def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
            seen.append(tuple(label.tolist()))
            return torch.zeros(*z.shape, N)

    sample(
        Recorder(None, N), process, batch=2, length=3, config=SamplerConfig(steps=50),
        label=torch.tensor([3, 8]),
    )  # fmt: skip
    assert set(seen) == {(3,), (8,)}


def test_legs_say_how_much_is_drawn() -> None:
    for process in PROCESSES.values():
        legs = list(time_grid(process, 7, torch.zeros(1)))
        assert sum(leg.gain for leg in legs) == pytest.approx(1.0)
        for leg in legs:
            assert leg.gain == pytest.approx(float(leg.at_s.alpha - leg.at_t.alpha))


def test_wrong_shapes_are_named() -> None:
    process = Masked(Vocab(N, 4))
    oracle = Oracle(lambda z, t: torch.zeros(*z.shape, N), N)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    for wrong in (
        {"given": tokens},
        {"frozen": tokens.bool()},
        {"given": tokens, "frozen": torch.ones(2, 4).bool()},
        {"label": torch.zeros(3)},
    ):
        with pytest.raises(UserError):
            sample(oracle, process, batch=2, length=5, **wrong)


@pytest.mark.parametrize("impl", ["thinned", "dense", "gumbel", "starved"])
def test_sampler_obeys_its_filter(impl: str) -> None:
    process = Masked(Vocab(N, 4))
    logits = torch.arange(N).float()
    oracle = Oracle(lambda z, t: logits.expand(*z.shape, N), N)
    config = SamplerConfig(steps=3, impl=impl, filter=Filter(top_p=0.7))
    # The two likeliest tokens have 0.63 and 0.23 of the probability: together they cross 0.7.
    drawn = sample(oracle, process, batch=4, length=100, config=config).tokens
    assert set(drawn.flatten().tolist()) == {N - 1, N - 2}


def test_trajectory_changes() -> None:
    mask = 9
    frames = torch.tensor([[[9, 9, 3, 4]], [[1, 9, 5, 9]], [[1, 2, 5, 4]]])
    path = Trajectory(frames, (1.0, 0.5, 0.0), (mask,))
    expected = [[Change.UNMASK, Change.NONE, Change.REFINE, Change.REMASK],
                [Change.NONE, Change.UNMASK, Change.NONE, Change.UNMASK]]  # fmt: skip
    assert path.changes()[:, 0].tolist() == expected
    assert path.counts() == {Change.UNMASK: [1, 2], Change.REFINE: [1, 0], Change.REMASK: [1, 0]}


def test_template() -> None:
    pieces = parse_template("A <mask:3> b<mask>.")
    assert [(p.text, p.hole) for p in pieces] == [("A", 0), ("", 3), (" b", 0), ("", 1), (".", 0)]
    for bad in ("no hole", "<mask:0>"):
        with pytest.raises(UserError):
            parse_template(bad)


@pytest.mark.parametrize(
    "slip", ["<mask:-1>", "<mask: 3>", "<MASK:4>", "<mask:>", "<mask 3>", "<mask:4\n <mask:2>"]
)
def test_a_slip_in_a_hole_is_not_kept_as_text(slip: str) -> None:
    with pytest.raises(UserError, match=rf"^{re.escape(repr(slip))} is no hole: write <mask:8>"):
        parse_template(f"a <mask:2> b {slip} c")


def test_what_cannot_be_meant_as_a_hole_is_text() -> None:
    pieces = parse_template('<mask id="a"> and x <mask and y> <mask>')
    assert [(p.text, p.hole) for p in pieces] == [('<mask id="a"> and x <mask and y>', 0), ("", 1)]


def test_a_long_slip_is_cut_short() -> None:
    for slip in ("<mask: " + "and so on " * 50 + ">", f"<mask:{'9' * 5000}>"):
        with pytest.raises(UserError, match=r"^'<mask.*\.\.\.' is no hole") as error:
            parse_template(slip)
        assert len(str(error.value)) < 120
