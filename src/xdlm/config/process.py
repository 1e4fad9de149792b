"""The noise process, as a recipe says it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from xdlm.errors import UserError, did_you_mean
from xdlm.noise import PROCESSES, SCHEDULES, NoiseProcess
from xdlm.structs import Vocab

#: The kind of process that is none.
AUTOREGRESSIVE = "autoregressive"


@dataclass(frozen=True)
class ProcessConfig:
    """The noise process."""

    kind: str = "mixed"
    """masked (MDLM), uniform (UDLM), mixed (XDLM) or gidd (GIDD); or autoregressive: no noise, each token
    is predicted from those before it (a judge of texts)."""
    k: float | None = None
    """mixed: share of uniform noise, 0 to 1 (default 0.1)."""
    p_uniform: float | None = None
    """gidd: probability of uniform noise at half time (default 0.1)."""
    gamma: float | None = None
    """gidd: shape of the uniform bump, above 0 and up to 2 (default 1)."""
    schedule: str | None = None
    """log-linear (default), cosine or polynomial; gidd has its own."""
    eps: float | None = None
    """What is left of the data at time 1 (default 1e-3)."""
    power: float | None = None
    """polynomial: exponent of time (default 2)."""
    mask_id: int | None = None
    """The token that is the mask, where the tokenizer has one (default: a state of its own after all
    tokens). A model that brings its own vocabulary has its mask there."""

    def __post_init__(self) -> None:
        self.build(Vocab(size=1000, mask_id=0))
        if self.mask_id is not None and (self.is_autoregressive or not self._class().wants_mask):
            raise UserError(f"process.mask_id has no meaning for kind '{self.kind}'; remove it")

    def vocab(self, n_tokens: int) -> Vocab:
        """The state space over `n_tokens` tokens: the mask is added as the last id, if there is one and
        it is not one of them."""
        if self.is_autoregressive or not self._class().wants_mask:
            return Vocab(n_tokens)
        if self.mask_id is not None:
            return Vocab(n_tokens, mask_id=self.mask_id)
        return Vocab(n_tokens + 1, mask_id=n_tokens)

    @property
    def is_autoregressive(self) -> bool:
        """Whether there is no noise, but a model that predicts the next token."""
        return self.kind == AUTOREGRESSIVE

    def _class(self) -> type[NoiseProcess]:
        if self.kind not in PROCESSES:
            known = (*PROCESSES, AUTOREGRESSIVE)
            raise UserError(f"unknown process '{self.kind}'{did_you_mean(self.kind, known)}")
        return PROCESSES[self.kind]

    def build(self, vocab: Vocab) -> NoiseProcess | None:
        """None where there is no noise."""
        if self.is_autoregressive:
            self._given(allowed=())
            return None
        cls = self._class()
        own = cls.settings
        given = self._given((*own, "schedule", "eps", "power") if cls.has_schedule else own)
        arguments = {name: given[name] for name in own if name in given}
        if cls.has_schedule:
            arguments["schedule"] = self._schedule()
        return cls(vocab, **arguments)  # type: ignore[call-arg]

    def _given(self, allowed: tuple[str, ...]) -> dict[str, Any]:
        """The settings that are set, all of them allowed."""
        given = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("kind", "mask_id") and getattr(self, f.name) is not None
        }
        for name in given:
            if name not in allowed:
                raise UserError(f"process.{name} has no meaning for kind '{self.kind}'; remove it")
        return given

    def _schedule(self) -> Any:
        name = self.schedule or "log-linear"
        if name not in SCHEDULES:
            raise UserError(f"unknown schedule '{name}'{did_you_mean(name, SCHEDULES)}")
        if self.power is not None and name != "polynomial":
            raise UserError(f"process.power has no meaning for schedule '{name}'; remove it")
        arguments = {"eps": self.eps, "power": self.power}
        return SCHEDULES[name](**{k: v for k, v in arguments.items() if v is not None})
