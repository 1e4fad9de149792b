"""A model as a harness of benchmarks asks it: text in, text or log-likelihoods out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from xdlm.errors import UserError
from xdlm.evaluation.conditional import Answer, Question, conditional_likelihood
from xdlm.evaluation.harness.settings import Completed, Responding, WriterSettings
from xdlm.evaluation.subject import Progress, unseen
from xdlm.sampling import ConfidenceConfig, configure
from xdlm.tokens.chat import ChatTemplate, ends_of_turn, find_template


@dataclass(frozen=True)
class Prompt:
    """A text to write on from, where to stop, and which repeat of the same text it is."""

    text: str
    stops: tuple[str, ...] = ()
    tokens: int | None = None
    """At most so many count, where a task asks for fewer than the settings."""
    repeat: int = 0


@dataclass(frozen=True)
class Reply:
    """An answer's text, where it was cut, and the forward passes that it took."""

    text: str
    nfe: float
    stopped: str
    """The stop string or `end of text`; empty where all of the tokens were used."""


@dataclass
class Responder:
    """Asks a model. Prompts begin as documents did in its training, and are cut at their beginning alone,
    where a `context` is given that they do not fit in; how many were is counted."""

    model: Responding
    writing: WriterSettings = field(default_factory=WriterSettings)
    draws: int = 32
    """Times at which a bound's integrand is looked at."""
    context: int | None = None
    """Tokens that a prompt and its answer may have together; by default any number."""
    progress: Progress = unseen
    n_cut: int = 0
    repeats_differ: bool = field(init=False, default=True)
    """Whether the same prompt, asked again, has another answer."""

    def __post_init__(self) -> None:
        if self.model.process is not None:
            config = configure(self.writing.how, self.model.process)
            if isinstance(config, ConfidenceConfig):
                config.plan(self.writing.length)
            self.repeats_differ = not isinstance(config, ConfidenceConfig) or config.is_random
        if self.draws < 1:
            raise UserError(f"a likelihood needs at least one draw, got {self.draws}")
        if self.context is not None and self.context <= self.writing.length:
            raise UserError(
                f"a context of {self.context} tokens leaves no room for a prompt before an answer of "
                f"{self.writing.length}"
            )

    def write(self, prompts: Sequence[Prompt]) -> list[Reply]:
        """Answers, each cut where its text or turn ends or before the first of the prompt's stop strings.
        What is random depends on the prompt's text and on which repeat of it this is."""
        encoded = [self._encoded(prompt.text, self.writing.length) for prompt in prompts]
        index = [_index(prompt) for prompt in prompts]
        with self.progress(f"answering in {self.writing.steps} steps") as show:
            found = self.model.complete(
                encoded, new_tokens=self.writing.length, seed=self.writing.seed, index=index,
                stop_ids=ends_of_turn(self.model.tokenizer), batch_tokens=self.writing.batch_tokens,
                on_step=show, **self.writing.how,
            )  # fmt: skip
        return [self._reply(*pair) for pair in zip(found, prompts, strict=True)]

    def template(self) -> ChatTemplate:
        """The model's, which it must have."""
        found = find_template(self.model.tokenizer)
        if found is None:
            raise UserError("the model has no chat template to be asked through; leave --chat out")
        return found

    def log_likelihood(self, pairs: Sequence[tuple[str, str]]) -> list[Answer]:
        """log p(continuation | context), or a lower bound on it (`xdlm.evaluation.conditional`)."""
        questions = [self._question(*pair) for pair in pairs]
        with self.progress("judging answers") as show:
            return conditional_likelihood(
                self.model.denoiser, self.model.process, questions, draws=self.draws,
                seed=self.writing.seed, batch_tokens=self.writing.batch_tokens, on_done=show,
            )  # fmt: skip

    def rolling(self, texts: Sequence[str]) -> list[Answer]:
        """log p of whole texts, each cut into rows and ended as in training: the very figure of
        `xdlm eval ppl`, in nats of the text rather than as a perplexity per token."""
        answers = []
        with self.progress("judging texts") as show:
            for number, text in enumerate(texts, start=1):
                found = self.model.perplexity_of(
                    self.model.pack([text]), draws=self.draws, seed=self.writing.seed,
                    batch=max(self.writing.batch_tokens // self.model.length, 1), max_rows=None,
                    on_batch=None,
                )  # fmt: skip
                nats, error = found.nats_per_token, found.nats_stderr
                answers.append(Answer(-nats * found.n_tokens, error * found.n_tokens, greedy=False))
                show(number, len(texts))
        return answers

    def _question(self, context: str, continuation: str) -> Question:
        """Blanks at the end of a context belong to what follows, as tokens carry the space before them."""
        if not continuation:
            raise UserError(f"there is nothing to judge behind '{context[-40:]}'")
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        together = self.model.tokenizer.encode(context + continuation)
        before = min(len(self.model.tokenizer.encode(context)), len(together) - 1)
        begin = self._begin() or ([] if self.model.process else [self.model.tokenizer.eos_id])
        head, tail = [*begin, *together[:before]], together[before:]
        if self.context is not None and len(head) + len(tail) > self.context:
            self.n_cut += 1
            head = head[len(head) + len(tail) - self.context :] if len(tail) < self.context else []
        return Question(tuple(head), tuple(tail))

    def _encoded(self, prompt: str, room: int) -> list[int]:
        ids = self.model.tokenizer.encode(prompt)
        begin = self._begin()
        ids = (
            ids if ids[: len(begin)] == begin else [*begin, *ids]
        )  # a template may begin texts itself
        if self.context is not None and len(ids) > self.context - room:
            self.n_cut += 1
            return ids[len(ids) - self.context + room :]
        return ids

    def _begin(self) -> list[int]:
        return [self.model.tokenizer.bos_id] if self.model.config.data.bos else []

    def _reply(self, found: Completed, prompt: Prompt) -> Reply:
        tokens = found.tokens[: prompt.tokens]
        whole = len(tokens) == len(found.tokens)
        stopped = "end of text" if found.stopped and whole else ""
        text = self.model.tokenizer.decode(tokens)
        places = [(text.find(stop), stop) for stop in prompt.stops if stop and stop in text]
        if places:
            at, stopped = min(places)
            text = text[:at]
        return Reply(text, found.nfe, stopped)


def _index(prompt: Prompt) -> int:
    digest = hashlib.sha256(f"{prompt.repeat} {prompt.text}".encode()).digest()
    return int.from_bytes(digest[:6], "big")
