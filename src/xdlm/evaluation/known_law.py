"""Texts whose law is known: what differs from it is the sampler's doing alone.

Every position i of such a text has a law p_i of its own, independent of all others. A prediction x~_i is
what the *other* positions say of x_i (what stands at i itself the posterior accounts for), so that
`x~_i = p_i` is ideal, reverse steps are Bayes' rule, and under every noise and in any number of steps the
texts have that law. So

    exp( mean of -log p_i(x_i) )    comes out at    exp( mean of H(p_i) )

but for chance, if tokens are drawn as the steps say. The laws are Zipf's, or what a language model says of
the token that comes next in a real text.
"""

from __future__ import annotations

import hashlib
import math
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

#: What laws are called that are Zipf's, before their exponents.
ZIPF = "zipf"
#: What is recorded of such texts: perplexity under their law, and entropy of their own tokens.
PERPLEXITY, ENTROPY = "law_ppl", "law_entropy"
#: The sampler of a record that is not of texts, but of what float32 noise makes of their law.
CALCULATED = "gumbel, calculated"
#: Positions whose laws are held at a time.
_AT_ONCE = 64


@dataclass(frozen=True)
class Law:
    """p_i = softmax(states_i . weight) at each of L positions: `states` [L, D], `weight` [V, D]."""

    name: str
    states: Tensor
    weight: Tensor

    @cached_property
    def digest(self) -> str:
        """In the place of a tokenizer's: what is said of other tokens or laws does not compare."""
        found = hashlib.sha256()
        for tensor in (self.states, self.weight):
            found.update(tensor.float().cpu().numpy().tobytes())
        return found.hexdigest()


def zipf(n_tokens: int, length: int, exponent: float = 1.0) -> Law:
    """The same law everywhere: the token of rank r has a probability in proportion to 1 / r^exponent."""
    if n_tokens < 2 or length < 1 or not 0 <= exponent <= 10:
        raise UserError("a law needs at least 2 tokens, 1 position and an exponent in 0..10")
    weight = -exponent * torch.arange(1, n_tokens + 1, dtype=torch.float64).log()
    return Law(f"{ZIPF}-{exponent:g}", torch.ones(length, 1), weight[:, None].float())


def next_tokens(model: CausalJudge, text: str, length: int) -> Law:
    """At each position what a language model expects behind as much of a real text."""
    states, weight = model.predictions(text, length)
    return Law(model.name, states.cpu(), weight.cpu())


class KnownLaw(Denoiser):
    """The ideal denoiser of such texts: it says the same whatever it is shown."""

    def __init__(self, law: Law, n_states: int) -> None:
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


class Faithfulness(NamedTuple):
    """Of texts against their law."""

    perplexity: Mean
    """Of the drawn tokens under the law itself; its error takes tokens for independent, as they are."""
    expected: float
    """What it comes out at if nothing but the law decides."""
    entropy: Mean | None
    """Of each text's own tokens, where there are texts."""


def draw_texts(
    law: Law,
    process: NoiseProcess,
    config: SamplerConfig,
    *,
    n: int,
    seed: int,
    device: torch.device,
    on_step: OnProgress | None = None,
) -> Tensor:
    """`n` texts [n, L] by a sampler that is given the law's own predictions."""
    ideal = KnownLaw(law, process.vocab.size).to(device)
    length = len(law.states)
    out = sample(ideal, process, batch=n, length=length, config=config, seed=seed, on_step=on_step)
    return out.tokens.cpu()


def faithfulness(law: Law, drawn: Tensor) -> Faithfulness:
    surprise, expected = [], []
    for start in range(0, len(law.states), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        log_p = (law.states[part].double() @ law.weight.double().T).log_softmax(-1)
        expected.append(-(log_p.exp() * log_p).sum(-1))
        surprise.append(-log_p.gather(1, drawn[:, part].T).T)
    nats, entropy = torch.cat(surprise, 1), torch.cat(expected)
    beyond = nats - entropy  # what a position's law does not explain is chance
    value = math.exp(nats.mean())
    error = float(beyond.std()) / math.sqrt(nats.numel()) if nats.numel() > 1 else math.nan
    return Faithfulness(
        Mean(value, value * error),
        math.exp(entropy.mean()),
        mean([token_entropy(row.numpy()) for row in drawn]),
    )
