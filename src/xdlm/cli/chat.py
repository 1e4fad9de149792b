"""`xdlm chat`: write with a model in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from xdlm.api import Completion, Model, check_writes, load
from xdlm.cli.options import parse
from xdlm.cli.progress import console, waiting
from xdlm.errors import UserError, check_seed
from xdlm.report import frame_text
from xdlm.sampling import ConfidenceConfig, How, Trajectory, configure
from xdlm.tokens.chat import ChatTemplate, Message, ends_of_turn, find_template

_DESCRIPTION = """Write with a model in turns; each answer is shown as it comes about.

Where the model has a chat template it answers messages. Else it goes on with the text: what you wrote and
what it wrote, one behind the other. An empty line lets it go on, /new begins anew, /quit or the end of
input leaves. What does not fit beside an answer is forgotten from the front.

examples:
  xdlm chat
  xdlm chat --model runs/llada --new-tokens 256 --steps 64 --block-length 32 --temperature 0
  echo "It was a dark night, and" | xdlm chat
"""


@dataclass(frozen=True)
class Options:
    model: str = "pocket"
    """A bundled name, a checkpoint folder or a run folder."""
    new_tokens: int = 64
    """Tokens of an answer, at most."""
    steps: int = 32
    """Steps of an answer."""
    sampler: Literal["ancestral", "confidence"] = "confidence"
    """As in `xdlm sample`."""
    block_length: int | None = None
    """confidence: write in blocks of this many tokens, one after the other; by default all at once."""
    guidance: float | None = None
    """confidence: strength of guidance by the conversation; 1 is off (default)."""
    refresh: int | None = None
    """confidence: run the model on the whole text only once in this many steps, and on the current block in
    the others: faster, but an approximation; by default on the whole text in every step."""
    temperature: float = 0.7
    """Below 1 is more careful, 0 takes the most likely token."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together have this probability."""
    k: float | None = None
    """Sample as if the model had been trained with mixed noise of this ratio k."""
    system: str = ""
    """What a model with a chat template is told beforehand."""
    context: int | None = None
    """Tokens of conversation and answer together; by default those of a row of training."""
    seed: int = 0
    """Same seed and same lines, same answers."""
    weights: Literal["ema", "raw"] = "ema"
    """Averaged weights (ema), or the last ones of training (raw)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the trunk."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def how(self) -> How:
        how = How(
            sampler=self.sampler, steps=self.steps, temperature=self.temperature, top_p=self.top_p
        )
        for name in ("block_length", "guidance", "refresh"):
            if getattr(self, name) is not None:
                how[name] = getattr(self, name)
        return how


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm chat", description=_DESCRIPTION)
    check_seed(options.seed, name="--seed")
    with waiting(f"reading {options.model}"):
        model = load(
            options.model, device=options.device, weights=options.weights,
            precision=options.precision,
        )  # fmt: skip
    model = model if options.k is None else model.mixed(options.k)
    template = find_template(model.tokenizer)
    talk = Conversation(model, template, options)
    screen = console(stderr=False)
    console().print(
        f"{options.model} {'answers' if template else 'goes on with your text'}; /new, /quit",
        style="dim",
    )  # fmt: skip
    for line in _lines(screen):
        if line == "/new":
            talk = Conversation(model, template, options)
            continue
        try:
            with _shown(screen, model) as show:
                answer = talk.answer(line, show)
        except UserError as error:  # of this line; the next may do
            console().print(f"xdlm: {error}")
            continue
        screen.print(Text(answer.text.strip()), soft_wrap=not screen.is_terminal)
        console().print(_told(answer), style="dim")


@dataclass
class Conversation:
    """What was said so far, as messages or as one text."""

    model: Model
    template: ChatTemplate | None
    options: Options
    messages: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    turns: int = 0

    def __post_init__(self) -> None:
        context = self.options.context or self.model.length
        self.room = context - self.options.new_tokens
        if self.options.new_tokens < 1 or self.room < 1:
            raise UserError(
                f"an answer of {self.options.new_tokens} tokens leaves no room in {context}; "
                "lower --new-tokens or raise --context"
            )
        check_writes(self.model.config)  # complain before the first line
        assert self.model.process is not None
        config = configure(self.options.how(), self.model.process)
        if isinstance(config, ConfidenceConfig):
            config.plan(self.options.new_tokens)
        if self.options.system:
            if self.template is None:
                raise UserError("--system needs a model with a chat template, and this has none")
            self.messages = [{"role": "system", "content": self.options.system}]

    def answer(self, line: str, show: Callable[[Tensor, int], None]) -> Completion:
        """What the model writes next; `show` is given all tokens after every step, and how many of them
        are not the answer's."""
        messages: list[Message] = [*self.messages, {"role": "user", "content": line}]
        if self.template is None:
            prompt = self._continued(line)
        else:
            prompt, messages = self._rendered(messages, self.template)
        (written,) = self.model.complete(
            [prompt], new_tokens=self.options.new_tokens, seed=(self.options.seed + self.turns) % 2**63,
            stop_ids=ends_of_turn(self.model.tokenizer),
            on_frame=lambda z: show(z, len(prompt)), **self.options.how(),
        )  # fmt: skip
        self.turns += 1
        self.ids = [*prompt, *written.tokens]
        self.messages = [*messages, {"role": "assistant", "content": written.text}]
        return written

    def _continued(self, line: str) -> list[int]:
        """The text so far and the line behind it, as far as there is room."""
        begins = bool(self.ids and line) and not line[0].isspace()
        ids = [*self.ids, *self.model.tokenizer.encode(f" {line}" if begins else line)]
        return ids[-self.room :]

    def _rendered(
        self, messages: list[Message], template: ChatTemplate
    ) -> tuple[list[int], list[Message]]:
        """The conversation as the model reads it, without its oldest turns if they do not fit."""
        first = 1 if self.options.system else 0
        while len(ids := self.model.tokenizer.encode(template.render(messages))) > self.room:
            if len(messages) <= first + 1:
                raise UserError(
                    f"the line has {len(ids)} tokens, and there is room for {self.room}"
                )
            messages = messages[:first] + messages[first + 2 :]  # a message and its answer
        return ids, messages


def _told(answer: Completion) -> str:
    """An answer may be empty, or break off in the middle of a word: neither should be a riddle."""
    why = "ended" if answer.stopped else "reached --new-tokens"
    return f"{len(answer.tokens)} tokens ({why}), {answer.nfe} forward passes"


def _lines(screen: Console) -> Iterator[str]:
    """What the person writes, until there is no more or they want no more."""
    while True:
        try:
            line = screen.input(Text("› ", style="bold") if screen.is_terminal else "")
        except EOFError:
            return
        if line == "/quit":
            return
        yield line


@contextmanager
def _shown(screen: Console, model: Model) -> Iterator[Callable[[Tensor, int], None]]:
    """An answer that changes on the terminal, coloured by what each step did."""
    if not screen.is_terminal:
        yield lambda z, n_prompt: None
        return
    assert model.process is not None
    special, mask_id = model.process.special_ids, model.process.vocab.mask_id
    before: Tensor | None = None
    with Live(console=screen, auto_refresh=False, transient=True) as live:

        def show(z: Tensor, n_prompt: int) -> None:
            nonlocal before
            now = z[:, n_prompt:].cpu()
            if before is None:
                before = now if mask_id is None else torch.full_like(now, mask_id)
            step = Trajectory(torch.stack([before, now]), (1.0, 0.0), special)
            before = now
            pieces = model.tokenizer.pieces(now[0].tolist())
            live.update(frame_text(step, pieces, 1), refresh=True)

        yield show
