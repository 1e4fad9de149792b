"""Texts whose law is known: what differs from it is the sampler's doing alone.

A prediction x~_i is what the *other* positions say of x_i (what stands at i itself the posterior accounts
for). Where every position i of a text has a law p_i of its own, independent of all others, `x~_i = p_i` is
ideal, reverse steps are Bayes' rule, and under every noise and in any number of steps the texts have that
law. So

    exp( mean of -log p_i(x_i) )    comes out at    exp( mean of H(p_i) )

but for chance, if tokens are drawn as the steps say. The laws are Zipf's, or what a language model says of
the token that comes next in a real text. `markov_law` has one whose tokens depend on each other.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xdlm.errors import UserError
from xdlm.evaluation.generation import Mean, mean, token_entropy
from xdlm.evaluation.judges import CausalJudge
from xdlm.evaluation.subject import OnProgress
from xdlm.models import Denoiser
from xdlm.models.contract import refuse_labels
from xdlm.noise import NoiseProcess
from xdlm.sampling import SamplerConfig, sample
from xdlm.sampling.writing import BATCH_TOKENS

#: What laws are called that are Zipf's, before their exponents.
ZIPF = "zipf"
#: What is recorded of such texts: perplexity under their law, and entropy of their own tokens; and of texts
#: of the law itself, the bound on their perplexity that ideal predictions give, and by how many nats a
#: token it is loose.
PERPLEXITY, ENTROPY, BOUND, EXCESS = "law_ppl", "law_entropy", "law_bound", "excess_nats"
#: The sampler of a record that is not of texts, but of what float32 noise makes of their law.
CALCULATED = "gumbel, calculated"
#: Positions whose laws are held at a time.
_AT_ONCE = 64


class Faithfulness(NamedTuple):
    """Of texts against their law."""

    perplexity: Mean
    """Of the drawn tokens under the law itself."""
    expected: Mean
    """What it comes out at if nothing but the law decides; without error where it can be calculated."""
    entropy: Mean | None
    """Of each text's own tokens, where there are texts."""
    own_entropy: Mean | None = None
    """The same of texts of the law itself, where those are drawn too."""


class Law(ABC):
    """Of texts, and what is ideal to know for drawing them."""

    name: str

    @property
    @abstractmethod
    def n_tokens(self) -> int:
        """V, of the vocabulary without a mask."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """In the place of a tokenizer's: what is said of other tokens or laws does not compare."""

    @abstractmethod
    def ideal(self, process: NoiseProcess) -> Denoiser:
        """That knows what there is to know of such texts under a noise."""

    @abstractmethod
    def faithfulness(self, drawn: Tensor) -> Faithfulness:
        """Of texts `drawn` [n, L]."""


@dataclass(frozen=True)
class IndependentLaw(Law):
    """p_i = softmax(states_i . weight) at each of L positions: `states` [L, D], `weight` [V, D]."""

    name: str
    states: Tensor
    weight: Tensor

    @property
    def n_tokens(self) -> int:
        return len(self.weight)

    @cached_property
    def digest(self) -> str:
        found = hashlib.sha256()
        for tensor in (self.states, self.weight):
            found.update(tensor.float().cpu().numpy().tobytes())
        return found.hexdigest()

    def ideal(self, process: NoiseProcess) -> Denoiser:
        return IndependentDenoiser(self, process.vocab.size)

    def faithfulness(self, drawn: Tensor) -> Faithfulness:
        """Errors take tokens for independent, as they are."""
        surprise, expected = [], []
        for start in range(0, len(self.states), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            log_p = (self.states[part].double() @ self.weight.double().T).log_softmax(-1)
            expected.append(-(log_p.exp() * log_p).sum(-1))
            surprise.append(-log_p.gather(1, drawn[:, part].T).T)
        nats, entropy = torch.cat(surprise, 1), torch.cat(expected)
        beyond = nats - entropy  # what a position's law does not explain is chance
        value = math.exp(nats.mean())
        error = float(beyond.std()) / math.sqrt(nats.numel()) if nats.numel() > 1 else math.nan
        return Faithfulness(
            Mean(value, value * error),
            Mean(math.exp(entropy.mean()), 0.0),
            mean([token_entropy(row.numpy()) for row in drawn]),
        )


def zipf(n_tokens: int, length: int, exponent: float = 1.0) -> IndependentLaw:
    """The same law everywhere: the token of rank r has a probability in proportion to 1 / r^exponent."""
    if n_tokens < 2 or length < 1 or not 0 <= exponent <= 10:
        raise UserError("a law needs at least 2 tokens, 1 position and an exponent in 0..10")
    weight = -exponent * torch.arange(1, n_tokens + 1, dtype=torch.float64).log()
    return IndependentLaw(f"{ZIPF}-{exponent:g}", torch.ones(length, 1), weight[:, None].float())


def next_tokens(model: CausalJudge, text: str, length: int) -> IndependentLaw:
    """At each position what a language model expects behind as much of a real text."""
    states, weight = model.predictions(text, length)
    return IndependentLaw(model.name, states.cpu(), weight.cpu())


class IndependentDenoiser(Denoiser):
    """The ideal denoiser of such texts: it says the same whatever it is shown."""

    def __init__(self, law: IndependentLaw, n_states: int) -> None:
        super().__init__()
        self.states = nn.Parameter(law.states, requires_grad=False)
        more = n_states - len(law.weight)  # states that are no token
        self.weight = nn.Parameter(F.pad(law.weight, (0, 0, 0, more)), requires_grad=False)

    def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        refuse_labels(label)
        return self.states.expand(len(z), -1, -1)

    @property
    def head_weight(self) -> Tensor:
        return self.weight

    @property
    def head_bias(self) -> None:
        return None


def draw_texts(
    law: Law,
    process: NoiseProcess,
    config: SamplerConfig,
    *,
    n: int,
    length: int,
    seed: int,
    device: torch.device,
    on_step: OnProgress | None = None,
) -> Tensor:
    """`n` texts [n, L] by a sampler that is given the law's own predictions, so many at a time."""
    ideal = law.ideal(process).to(device)
    parts = torch.arange(n).split(max(1, BATCH_TOKENS // length))
    drawn = []
    for i, index in enumerate(parts):
        out = sample(
            ideal, process, batch=len(index), length=length, config=config, seed=seed, index=index,
            on_step=None if on_step is None else _in_parts(on_step, i, len(parts)),
        )  # fmt: skip
        drawn.append(out.tokens.cpu())
    return torch.cat(drawn)


def _in_parts(on_step: OnProgress, i: int, n: int) -> OnProgress:
    """Progress of the i-th of `n` parts, as one of all."""
    return lambda done, of: on_step(i * of + done, n * of)
