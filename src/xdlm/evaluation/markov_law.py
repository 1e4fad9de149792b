"""A known law whose tokens depend on each other: a hidden Markov model.

    p(x) = sum over k_1 .. k_L of  first(k_1) prod_i next(k_i, k_(i+1)) prod_i says(k_i, x_i)

Noise acts on each token alone, so a noisy text has the same hidden states, each of which shows

    seen_i(k) = sum_e says(k, e) q_t(z_i | e) = alpha_t says(k, z_i) + b_t(z_i),

and the forward-backward algorithm gives what the *other* positions say of the state at i, and with it the
ideal prediction under every noise (`known_law` says why the other ones):

    x~_i = p(x_i | z_j, j != i) = sum_k before_i(k) after_i(k) says(k, .) / sum_k before_i(k) after_i(k).

With it nothing is left to be learned, and nobody has to judge: what texts of few steps lack is what it
costs to draw many tokens at once, under that noise; in many steps, drawn exactly, they have the law.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from xdlm.data import Rows, TokensInMemory
from xdlm.errors import UserError
from xdlm.evaluation.generation import Mean, mean, token_entropy
from xdlm.evaluation.known_law import Faithfulness, Law
from xdlm.evaluation.likelihood import Likelihood, likelihood, row_order
from xdlm.evaluation.subject import OnProgress
from xdlm.files import write_atomic
from xdlm.models import Denoiser
from xdlm.models.contract import refuse_labels
from xdlm.noise import NoiseProcess

#: What the command line calls such a law, and what stored ones end with.
MARKOV, SUFFIX = "markov", ".safetensors"
_TENSORS = ("first", "next", "says")
#: Texts of the law itself that its perplexity is told by, and how many are worked on at a time.
_OWN_TEXTS, _AT_ONCE = 8192, 1024
#: And how many a bound is told by at a time, whose states are held at all positions.
_ROWS = 128
#: What is impossible has a logarithm all the same: the mask's, which nobody asks for.
_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class MarkovLaw(Law):
    """`first` [K], `next` [K, K] and `says` [K, V], float32: each row a distribution."""

    name: str
    first: Tensor
    next: Tensor
    says: Tensor
    origin: dict[str, Any] = field(default_factory=dict)
    """The settings that it was learned by."""

    @property
    def n_tokens(self) -> int:
        return self.says.shape[1]

    @property
    def n_hidden(self) -> int:
        return len(self.first)

    @cached_property
    def digest(self) -> str:
        found = hashlib.sha256()
        for name in _TENSORS:
            found.update(getattr(self, name).contiguous().numpy().tobytes())
        return found.hexdigest()

    def ideal(self, process: NoiseProcess) -> Denoiser:
        return IdealDenoiser(self, process)

    def nats(self, texts: Tensor) -> Tensor:
        """-log p of each of `texts` [n, L], float64 [n]."""
        first, following, says = (getattr(self, name).double() for name in _TENSORS)
        found = []
        for part in texts.split(_AT_ONCE):
            before, total = first.expand(len(part), -1), torch.zeros(len(part)).double()
            for tokens in part.T:
                joint = before * says.T[tokens]
                p = joint.sum(1)
                total -= p.log()
                before = (joint / p[:, None]) @ following
            found.append(total)
        return torch.cat(found) if found else torch.zeros(0).double()

    def texts(self, n: int, length: int, seed: int) -> Tensor:
        """`n` texts of the law itself, [n, L]."""
        generator = np.random.default_rng(seed)
        first, following, says = (
            getattr(self, name).double().cumsum(-1).numpy() for name in _TENSORS
        )
        states = np.empty((n, length), dtype=np.int64)
        for i in range(length):
            rows = following[states[:, i - 1]] if i else np.broadcast_to(first, (n, len(first)))
            states[:, i] = (generator.random((n, 1)) * rows[:, -1:] >= rows).sum(1)
        tokens, u = np.empty_like(states), generator.random(states.shape)
        for state, row in enumerate(says):
            at = states == state
            tokens[at] = np.searchsorted(row, u[at] * row[-1], side="right")
        return torch.from_numpy(tokens)

    def faithfulness(self, drawn: Tensor) -> Faithfulness:
        """A text's tokens depend on each other: errors are over texts."""
        own, entropy = self._own(drawn.shape[1])
        return Faithfulness(
            self._perplexity(drawn), own, mean([token_entropy(row.numpy()) for row in drawn]), entropy
        )  # fmt: skip

    def _perplexity(self, texts: Tensor) -> Mean:
        nats = self.nats(texts) / texts.shape[1]
        value = math.exp(nats.mean())
        error = float(nats.std()) / math.sqrt(len(nats)) if len(nats) > 1 else math.nan
        return Mean(value, value * error)

    @cached_property
    def _known(self) -> dict[int, tuple[Mean, Mean]]:
        return {}

    def _own(self, length: int) -> tuple[Mean, Mean]:
        """Perplexity and entropy of the law's own texts of a length, by many of them."""
        if length not in self._known:
            texts = self.texts(_OWN_TEXTS, length, seed=0)
            entropy = mean([token_entropy(row.numpy()) for row in texts])
            self._known[length] = self._perplexity(texts), entropy
        return self._known[length]

    def save(self, file: Path) -> None:
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        about = {"law": self.name, "origin": json.dumps(self.origin)}
        write_atomic(file, save(tensors, metadata=about))

    @classmethod
    def load(cls, file: Path) -> MarkovLaw:
        try:
            with safe_open(file, "pt") as stored:
                about = stored.metadata() or {}
                first, following, says = (stored.get_tensor(key) for key in _TENSORS)
            name, origin = about["law"], json.loads(about["origin"])
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror or error}") from error
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{file} is not a law that was kept: {error}") from error
        n = first.numel()
        if first.shape != (n,) or following.shape != (n, n) or says.shape[:-1] != (n,):
            raise UserError(f"{file} holds no law: its tensors do not fit each other")
        for rows in (first, following, says):
            if rows.dtype != torch.float32 or not _are_distributions(rows):
                raise UserError(
                    f"{file} holds no law: its rows are no distributions in float32 in which nothing is "
                    "impossible"
                )
        if not isinstance(origin, dict):
            raise UserError(f"{file} holds no law: it does not say what it was learned from")
        return cls(name, first, following, says, origin)


def _are_distributions(rows: Tensor) -> bool:
    """Without zeros, which messages between positions could come down to."""
    sums = rows.double().sum(-1)
    return bool((rows > 0).all() and ((sums - 1).abs() < 1e-5).all())


def messages(first: Tensor, following: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """What the positions before each one say of its state, and what those after it do, from `seen`
    [L, B, K]: both [L, B, K], up to a factor; the former are distributions."""
    before, after = torch.empty_like(seen), torch.empty_like(seen)
    before[0], after[-1] = first, 1.0
    for i in range(len(seen) - 1):
        step = (before[i] * seen[i]) @ following
        before[i + 1] = step / step.sum(-1, keepdim=True)
        step = (after[-1 - i] * seen[-1 - i]) @ following.T
        after[-2 - i] = step / step.sum(-1, keepdim=True)
    return before, after


class IdealDenoiser(Denoiser):
    """Predicts as well as can be, under a noise process. Its hidden states are the law's."""

    linear_head = False

    def __init__(self, law: MarkovLaw, process: NoiseProcess) -> None:
        super().__init__()
        self.process = process
        more = process.vocab.size - law.n_tokens  # the mask, which no state says
        if more < 0 or any(token < law.n_tokens for token in process.special_ids):
            raise UserError(
                f"the law has {law.n_tokens} tokens, and special ones come behind them: its vocabulary "
                f"cannot be {process.vocab}"
            )
        self.first = nn.Parameter(law.first, requires_grad=False)
        self.next = nn.Parameter(law.next, requires_grad=False)
        self.says = nn.Parameter(F.pad(law.says, (0, more)), requires_grad=False)
        self.said = nn.Parameter(self.says.T.contiguous(), requires_grad=False)  # by token

    @property
    def n_states(self) -> int:
        return self.says.shape[1]

    def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        """What the other positions say of each one's state, [B, L, K]."""
        refuse_labels(label)
        before, after = messages(self.first, self.next, self._seen(z, t).transpose(0, 1))
        state = (before * after).transpose(0, 1)
        return state / state.sum(-1, keepdim=True)

    def head(self, hidden: Tensor) -> Tensor:
        return (hidden.float() @ self.says).clamp_min_(_TINY).log_()

    def _seen(self, z: Tensor, t: Tensor) -> Tensor:
        """How likely each state is to show `z`, over the likeliest one: [B, L, K]."""
        begun = (t == 1)[:, None]  # a sampler and a bound both begin with pure noise
        at_t, pure = self.process.coefs(t.double()), self.process.terminal(t.double())
        b = torch.where(begun, pure.b.at(z), at_t.b.at(z))
        # What noise cannot make is the text itself, such as a prompt, from the first step on.
        alpha = torch.where(begun, (b == 0).double(), at_t.alpha[:, None])
        shown = F.embedding(z, self.said).double()
        seen = alpha[..., None] * shown + b[..., None]
        return (seen / seen.amax(-1, keepdim=True)).to(self.says.dtype)


class Bound(NamedTuple):
    """What ideal predictions say of texts of the law, beside what the law itself says of the same ones."""

    perplexity: Mean
    own: float
    """The law's perplexity of them."""
    excess: Mean
    """Nats per token by which the bound lies above it; the error is that of differences, over texts."""
    likelihood: Likelihood
    """The bound as it was measured, with what each text came to."""


def bound_of(
    law: MarkovLaw,
    process: NoiseProcess,
    texts: Tensor,
    *,
    seed: int,
    device: torch.device,
    on_batch: OnProgress | None = None,
) -> Bound:
    """On the perplexity of texts [n, L] of the law: tight, but for chance and for the steps at its ends."""
    tokens = texts.flatten().numpy().astype(np.uint32)
    rows = Rows(TokensInMemory(tokens, 0, len(texts)), texts.shape[1])
    ideal = law.ideal(process).to(device)
    found = likelihood(ideal, process, rows, batch=_ROWS, seed=seed, on_batch=on_batch)
    truth = law.nats(texts)
    beyond = torch.tensor(found.row_nats).double() - truth[row_order(rows, seed)]
    length = texts.shape[1]
    return Bound(
        Mean(found.value, found.stderr),
        math.exp(float(truth.mean()) / length),
        mean((beyond / length).tolist()),
        found,
    )
