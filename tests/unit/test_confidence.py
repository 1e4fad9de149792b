"""Confidence decoding against the paper's listing and LLaDA's loop; prompts, ends, guidance, limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoding import COLD, MASK, PROCESS, N, Small, with_room
from hypothesis import given as tried
from hypothesis import settings
from hypothesis import strategies as st
from test_sampling import Oracle, frequencies_match
from torch import Tensor

from xdlm import UserError, Vocab
from xdlm.noise import Gidd, Masked, Mixed, Uniform
from xdlm.ops import Stream, uniform
from xdlm.sampling import (
    Block,
    Change,
    ConfidenceConfig,
    Filter,
    configure,
    decode,
    plan_blocks,
)
from xdlm.sampling.schedule import split


@pytest.fixture(scope="module")
def model() -> Small:
    return Small()


def logits_of(model: Small, token_ids: Tensor) -> Tensor:
    hidden = model.trunk(token_ids[None], torch.zeros(1))[0]
    logits = hidden @ model.head_weight.T + model.head_bias
    logits[:, MASK] = -torch.inf
    return logits.detach()


def draw_dense(logits: Tensor, temperature: float, u: Tensor) -> Tensor:
    """`argmax(add_gumbel_noise(logits))` as a draw by one number a row."""
    if temperature == 0:
        return logits.argmax(-1)
    cdf = (logits / temperature).softmax(-1).cumsum(-1)
    return (cdf <= u[:, None] * cdf[:, -1:]).sum(-1)


def numbers(index: int, length: int, step: int, seed: int = 0) -> Tensor:
    return uniform(seed, Stream.TOKEN, torch.tensor([index]), torch.arange(length), step)


def topk(priority: Tensor, k: int) -> Tensor:
    """`torch.topk` that leaves out what has no priority at all."""
    return torch.topk(priority, min(k, int((priority > -np.inf).sum()))).indices


def generate(model, steps, seq_length, topk_absorb, topk_uniform, k, *, temperature, index):
    """The listing of Algorithm 1, line by line."""
    token_ids = torch.full((seq_length,), MASK)
    for i in range(steps):
        is_masked = token_ids == MASK
        logits = logits_of(model, token_ids)
        pred_tokens = draw_dense(logits, temperature, numbers(index, seq_length, i))
        probs = torch.softmax(logits, dim=-1)
        pred_confidence = torch.gather(probs, -1, pred_tokens[:, None]).squeeze(-1)
        mask_priority = torch.where(is_masked, pred_confidence, -np.inf)
        if k > 0.0:
            current_confidence = torch.gather(probs, -1, token_ids[:, None]).squeeze(-1)
            can_be_refined = (
                (~is_masked)
                & (pred_tokens != token_ids)
                & (pred_confidence >= current_confidence)
            )  # fmt: skip
            refine_priority = torch.where(can_be_refined, pred_confidence, -np.inf)
        update_mask = torch.zeros_like(pred_tokens, dtype=torch.bool)
        update_mask[topk(mask_priority, topk_absorb[i])] = True
        if k > 0.0:
            update_mask[topk(refine_priority, topk_uniform[i])] = True
        token_ids[update_mask] = pred_tokens[update_mask]
    return token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("k", [0.0, 0.1, 0.6])
def test_matches_the_listing(model, k: float, temperature: float) -> None:
    length, batch = 40, 6
    for steps in (1, 7, 16, 50):
        config = ConfidenceConfig(steps=steps, filter=Filter(temperature=temperature), k=k)
        (block,) = plan_blocks(length, steps=steps, k=k)
        nothing = torch.zeros(batch, length, dtype=torch.int64)
        out = decode(
            model, PROCESS, given=nothing, frozen=nothing.bool(), config=config, record=True
        )
        rewritten = (out.trajectory.changes() == Change.REFINE).sum()
        # In one step nothing has been written yet.
        assert (rewritten > 0) == (k > 0 and steps > 1)
        for i in range(batch):
            expected = generate(
                model, steps, length, block.topk_absorb, block.topk_uniform, k,
                temperature=temperature, index=i,
            )  # fmt: skip
            assert out.tokens[i].tolist() == expected.tolist()


def llada(model, prompt: Tensor, gen_length: int, steps: int, block_length: int, *, scale, index):
    """LLaDA's loop over blocks of one text, plainly: no row is left out, nothing is thinned."""
    x = torch.cat([prompt, torch.full((gen_length,), MASK)])
    n_prompt, step = len(prompt), 0
    n_blocks = gen_length // block_length
    for block in range(n_blocks):
        end = n_prompt + (block + 1) * block_length
        for n in split(block_length, steps // n_blocks):
            logits = logits_of(model, x)
            if scale != 1:
                blind = x.clone()
                blind[:n_prompt] = MASK
                without = logits_of(model, blind)
                logits = torch.where(
                    logits > -torch.inf, without + scale * (logits - without), logits
                )
            x0 = draw_dense(logits, 0.8, numbers(index, len(x), step))
            sure = logits.softmax(-1).gather(-1, x0[:, None])[:, 0]
            sure[end:] = -np.inf
            sure[x != MASK] = -np.inf
            chosen = sure.topk(n).indices
            x[chosen] = x0[chosen]
            step += 1
    return x


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.5])
def test_without_rewriting_it_is_llada(model, scale: float) -> None:
    batch, n_prompt, n_new = 4, 5, 24
    prompt = torch.randint(8, N, (batch, n_prompt), generator=torch.Generator().manual_seed(0))
    given, frozen = with_room(prompt, n_new)
    config = ConfidenceConfig(
        steps=12, block_length=8, filter=Filter(temperature=0.8), guidance=scale
    )
    out = decode(model, PROCESS, given=given, frozen=frozen, config=config)
    for i in range(batch):
        expected = llada(model, prompt[i], n_new, 12, 8, scale=scale, index=i)
        assert out.tokens[i].tolist() == expected.tolist()
    passes = 1 if scale == 1 else 2
    assert out.nfe.tolist() == [12 * passes] * batch
    # The head saw the masks of one block at a time: 8, 6, 4 and 2 of them.
    assert out.head_rows == batch * 3 * (8 + 6 + 4 + 2)


@settings(max_examples=300, deadline=None)
@tried(
    st.integers(1, 400), st.integers(1, 300), st.none() | st.integers(1, 300), st.floats(0, 1)
)  # fmt: skip
def test_every_mask_is_filled(steps: int, length: int, block_length: int | None, k: float) -> None:
    n_blocks = 1 if block_length is None else -(-length // block_length)
    if steps < n_blocks:
        with pytest.raises(UserError, match=f"{steps} steps cannot fill {n_blocks} blocks"):
            plan_blocks(length, steps=steps, block_length=block_length, k=k)
        return
    blocks = plan_blocks(length, steps=steps, block_length=block_length, k=k)
    assert [b.stop - b.start for b in blocks] == [sum(b.topk_absorb) for b in blocks]
    assert [b.start for b in blocks] == [0, *(b.stop for b in blocks[:-1])]
    assert blocks[-1].stop == length
    assert sum(len(b.topk_absorb) for b in blocks) == steps
    filled = np.cumsum([n for block in blocks for n in block.topk_absorb])
    rewritten = np.cumsum([n for block in blocks for n in block.topk_uniform])
    assert rewritten[0] == 0 and (np.diff(rewritten) >= 0).all()
    if k < 0.5 and steps > 1:  # none is lost where one block ends and the next begins
        assert (rewritten[1:] == np.floor(filled[1:] * k / (1 - k) + 1e-9)).all()


@settings(max_examples=200, deadline=None)
@tried(st.integers(1, 100), st.integers(1, 300), st.integers(0, 49))
def test_rewrites_are_those_of_the_published_code(steps: int, length: int, percent: int) -> None:
    """`generate_xdm` of LLaDA-XDLM, with its tensors of counts, in float64."""
    k = percent / 100
    (block,) = plan_blocks(length, steps=steps, k=k)
    written = torch.tensor(block.topk_absorb).cumsum(0).double()
    rewritten = (written * k / (1 - k) + 1e-9).floor().long()
    rewritten[0] = 0
    expected = torch.cat([rewritten[:1], rewritten[1:] - rewritten[:-1]])
    assert list(block.topk_uniform) == expected.tolist()


def test_a_thousand_random_generations_keep_their_prompts(model) -> None:
    """Whatever the settings, what is frozen is what was given, mask ids in it included."""
    generator = np.random.default_rng(0)
    runs, per_run = 40, 25
    for run in range(runs):
        length = int(generator.integers(4, 30))
        n_frozen = int(generator.integers(1, length))
        frozen = torch.from_numpy(
            generator.permuted(np.tile(np.arange(length) < n_frozen, (per_run, 1)), axis=1)
        )
        given = torch.from_numpy(generator.integers(0, N, (per_run, length)))
        config = ConfidenceConfig(
            steps=length, k=float(generator.choice([0, 0.1, 1])),
            block_length=int(generator.integers(1, length + 1)),
            guidance=float(generator.choice([1, 2])),
            filter=Filter(float(generator.choice([0, 0.5, 1.5])), float(generator.choice([0.6, 1]))),
            confidence=str(generator.choice(["token", "entropy", "margin", "random"])),
        )  # fmt: skip
        out = decode(
            model, PROCESS, given=given, frozen=frozen, config=config, seed=run, record=True,
            stop_ids=(3,) if run % 2 else (),
        )  # fmt: skip
        assert (out.trajectory.frames == given)[:, frozen].all()
        assert not (out.tokens == MASK)[~frozen].any()
        assert (out.trajectory.frames[-1] == out.tokens).all()


@pytest.mark.parametrize("k", [0.0, 0.3])
def test_a_row_does_not_depend_on_the_batch(model, k: float) -> None:
    prompt = torch.randint(8, N, (5, 3), generator=torch.Generator().manual_seed(1))
    given, frozen = with_room(prompt, 18)
    config = ConfidenceConfig(steps=9, k=k, block_length=6, guidance=1.5)
    args = {"config": config, "seed": 3, "stop_ids": (2, 5, 11)}
    together = decode(model, PROCESS, given=given, frozen=frozen, **args)
    assert len(set(together.ends.tolist())) > 1, "rows end at different places"
    for i in (4, 0, 2):
        alone = decode(
            model, PROCESS, given=given[i : i + 1], frozen=frozen[i : i + 1],
            index=torch.tensor([i]), **args,
        )  # fmt: skip
        assert alone.tokens[0].tolist() == together.tokens[i].tolist()
        assert (alone.ends[0], alone.nfe[0]) == (together.ends[i], together.nfe[i])


def writer(text: list[int]) -> Oracle:
    """A model that wants this text, and is surer of what stands further left."""
    wanted = torch.nn.functional.one_hot(torch.tensor(text), N).float()
    sharp = torch.linspace(20, 15, len(text))[:, None]
    return Oracle(lambda z, t: (wanted * sharp).expand(len(z), -1, -1), N)


@pytest.mark.parametrize("block_length", [4, None])
def test_stops_at_the_end(block_length: int | None) -> None:
    text = [8, 9, 10, 11, 12, 3, 13, 14, 15, 16, 17, 18]
    oracle = writer(text)
    nothing = torch.zeros(2, len(text), dtype=torch.int64)
    config = ConfidenceConfig(steps=12, block_length=block_length, filter=COLD)
    args = {"given": nothing, "frozen": nothing.bool(), "config": config}
    whole = decode(oracle, PROCESS, **args)
    assert whole.tokens.tolist() == [text] * 2 and whole.ends.tolist() == [12, 12]
    stopped = decode(oracle, PROCESS, **args, stop_ids=(3, 4), record=True)
    assert stopped.tokens.tolist() == [text[:5] + [3] * 7] * 2
    assert stopped.ends.tolist() == [5, 5]
    assert stopped.nfe.tolist() == [6, 6], "one step a token, up to the end"
    assert stopped.trajectory.steps == 6
    # Rewriting, it looks where blocks end: the second of three, or the one that there is.
    k = ConfidenceConfig(steps=12, block_length=block_length, filter=COLD, k=0.5)
    rewriting = decode(oracle, PROCESS, **{**args, "config": k}, stop_ids=(3,))
    assert rewriting.tokens.tolist() == stopped.tokens.tolist()
    assert rewriting.nfe.tolist() == ([8, 8] if block_length else [12, 12])


def test_an_end_with_masks_before_it_is_none_yet() -> None:
    """The model is surest of the end; what stands before it must be written all the same."""
    text = [8, 9, 10, 3]
    wanted = torch.nn.functional.one_hot(torch.tensor(text), N).float()
    oracle = Oracle(lambda z, t: (wanted * torch.tensor([[9.0], [9.5], [8], [20]]))[None], N)
    nothing = torch.zeros(1, 4, dtype=torch.int64)
    out = decode(
        oracle, PROCESS, given=nothing, frozen=nothing.bool(), stop_ids=(3,),
        config=ConfidenceConfig(steps=4, filter=COLD),
    )  # fmt: skip
    assert out.tokens.tolist() == [text] and out.ends.tolist() == [3]


def test_an_end_in_the_prompt_ends_nothing() -> None:
    text = [8, 9, 10, 11]
    given, frozen = with_room(torch.tensor([[3, 8]]), 2)
    config = ConfidenceConfig(steps=2, filter=COLD)
    out = decode(writer(text), PROCESS, given=given, frozen=frozen, config=config, stop_ids=(3,))
    assert out.tokens.tolist() == [[3, 8, 10, 11]] and out.ends.tolist() == [4]


def test_steps_with_nothing_to_do_cost_nothing(model) -> None:
    nothing = torch.zeros(2, 6, dtype=torch.int64)
    out = decode(
        model, PROCESS, given=nothing, frozen=nothing.bool(), config=ConfidenceConfig(steps=50)
    )
    assert out.nfe.tolist() == [6, 6]


def test_temperature_limits() -> None:
    """0 takes the most likely token, 1 draws by the law, much more by none."""
    law = torch.tensor([0.001, 0.5, 0.3, 0.199])
    logits = torch.full((N,), -1e4)
    logits[8:12] = law.log()
    oracle = Oracle(lambda z, t: logits.expand(*z.shape, N), N)
    nothing = torch.zeros(20, 1000, dtype=torch.int64)
    args = {"given": nothing, "frozen": nothing.bool()}
    cold = decode(oracle, PROCESS, config=ConfidenceConfig(steps=1, filter=COLD), **args)
    assert cold.tokens.unique().tolist() == [9]
    drawn = decode(oracle, PROCESS, config=ConfidenceConfig(steps=1), **args).tokens
    assert frequencies_match(drawn, torch.nn.functional.pad(law, (8, N - 12)).double())
    hot = ConfidenceConfig(steps=1, filter=Filter(temperature=1000.0))
    flat = decode(
        Oracle(lambda z, t: z[..., None] * torch.zeros(N), N), PROCESS, config=hot, **args
    )
    expected = torch.full((N,), 1 / (N - 1), dtype=torch.float64)
    expected[MASK] = 0
    assert frequencies_match(flat.tokens, expected)


def test_most_confident_first() -> None:
    """Each measure of confidence has the position filled first that it should."""
    rows = torch.full((3, N), -1e4)
    rows[0, 8:11] = torch.tensor([0.5, 0.49, 0.01]).log()  # the lowest entropy
    rows[1, 8:14] = torch.tensor([0.45, 0.11, 0.11, 0.11, 0.11, 0.11]).log()  # the widest margin
    rows[2, 8:19] = torch.tensor([0.52, 0.4] + [0.08 / 9] * 9).log()  # the likeliest token
    oracle = Oracle(lambda z, t: rows[None], N)
    nothing = torch.zeros(1, 3, dtype=torch.int64)
    for confidence, first in (("entropy", 0), ("margin", 1), ("token", 2)):
        config = ConfidenceConfig(steps=3, filter=COLD, confidence=confidence)
        out = decode(
            oracle, PROCESS, given=nothing, frozen=nothing.bool(), config=config, record=True
        )
        assert (out.trajectory.frames[1, 0] != MASK).nonzero().flatten().tolist() == [first]


def test_near_certainties_are_told_apart() -> None:
    """1 - 1e-9 and 1 - 1e-12 are both 1 in float32."""
    rows = torch.zeros(2, N)
    rows[0, 8], rows[1, 8] = 24.0, 31.0
    nothing = torch.zeros(1, 2, dtype=torch.int64)
    out = decode(
        Oracle(lambda z, t: rows[None], N), PROCESS, given=nothing, frozen=nothing.bool(),
        config=ConfidenceConfig(steps=2, filter=COLD), record=True,
    )  # fmt: skip
    assert out.trajectory.frames[1].tolist() == [[MASK, 8]]


def test_guidance_of_one_is_off_and_more_goes_further(model) -> None:
    prompt = torch.randint(8, N, (3, 4), generator=torch.Generator().manual_seed(2))
    given, frozen = with_room(prompt, 10)
    seen: list[int] = []

    def spy(z: Tensor, t: Tensor) -> Tensor:
        seen.append(len(z))
        return model.trunk(z, t) @ model.head_weight.T

    def run(guidance: float) -> Tensor:
        seen.clear()
        config = ConfidenceConfig(steps=5, guidance=guidance, filter=COLD)
        return decode(Oracle(spy, N), PROCESS, given=given, frozen=frozen, config=config).tokens

    off = run(1.0)
    assert seen == [3] * 5
    assert not torch.equal(run(4.0), off)
    assert seen == [6] * 5, "one pass for both branches"


def test_a_plan_of_ones_own(model) -> None:
    nothing = torch.zeros(2, 6, dtype=torch.int64)
    args = {"given": nothing, "frozen": nothing.bool(), "record": True}
    out = decode(model, PROCESS, blocks=[Block(0, 6, (1, 2, 3), (0, 0, 1))], **args)
    filled = [(frame != MASK).sum(1).tolist() for frame in out.trajectory.frames]
    assert filled == [[0, 0], [1, 1], [3, 3], [6, 6]]
    assert out.trajectory.times == pytest.approx((1, 5 / 6, 1 / 2, 0))
    for blocks, says in (
        ([Block(0, 6, (1, 2), (0, 0))], "does not fill its masks"),
        ([Block(0, 5, (5,), (0,))], "for 5 open positions, but there are 6"),
        ([Block(1, 6, (5,), (0,))], "must join"),
    ):
        with pytest.raises(UserError, match=says):
            decode(model, PROCESS, blocks=blocks, **args)


def test_rewriting_is_that_of_the_noise() -> None:
    """GIDD's uniform noise leaves the mask out: next to no masks, and a mask has less than uniform noise
    over all states would give it."""
    vocab = Vocab(3, 2)
    for process, share in (
        (Masked(vocab), 0.0), (Mixed(vocab, k=0.3), 0.3), (Gidd(vocab, p_uniform=0.99), 1.0),
    ):  # fmt: skip
        assert configure({"sampler": "confidence"}, process) == ConfidenceConfig(k=share)


def test_bad_input_is_said(model) -> None:
    given, frozen = with_room(torch.zeros(2, 1, dtype=torch.int64), 4)
    uneven = frozen.clone()
    uneven[0, 2] = True
    cases = (
        (lambda: ConfidenceConfig(steps=0), "at least 1 step"),
        (lambda: ConfidenceConfig(block_length=0), "block_length must be at least 1"),
        (lambda: ConfidenceConfig(k=1.5), "k must lie in"),
        (lambda: ConfidenceConfig(guidance=-1), "guidance must lie in"),
        (lambda: ConfidenceConfig(guidance=float("nan")), "guidance must lie in"),
        (lambda: ConfidenceConfig(confidence="entropi"), "did you mean 'entropy'"),
        (lambda: decode(model, Uniform(Vocab(N)), given=given, frozen=frozen), "has none"),
        (lambda: decode(model, PROCESS, given=given, frozen=uneven), "as many open positions"),
        (lambda: decode(model, PROCESS, given=given, frozen=frozen[:1]), "go together"),
        (
            lambda: decode(model, PROCESS, given=given, frozen=frozen, index=torch.arange(3)),
            r"index numbers \[3\] rows, and there are 2",
        ),
        (lambda: decode(model, PROCESS, given=given, frozen=frozen | True), "no position to fill"),
        (
            lambda: decode(model, PROCESS, given=given, frozen=frozen, stop_ids=(MASK,)),
            "cannot be a token that ends",
        ),
        (
            lambda: decode(
                model, Masked(Vocab(N, MASK)), given=given, frozen=torch.zeros_like(frozen),
                config=ConfidenceConfig(guidance=2.0),
            ),
            "needs a prompt",
        ),
        (
            lambda: decode(
                model, PROCESS, given=given, frozen=frozen,
                config=ConfidenceConfig(steps=2, block_length=1),
            ),
            "2 steps cannot fill 4 blocks",
        ),
    )  # fmt: skip
    for call, says in cases:
        with pytest.raises(UserError, match=says):
            call()
