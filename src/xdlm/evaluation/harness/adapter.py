"""The library as a model of lm-eval, under the name `xdlm`.

    from xdlm.evaluation.harness import register

    register()
    lm_eval.simple_evaluate("xdlm", model_args="model=pocket,steps=32", tasks=[...])

or on lm-eval's own command line, with all of its tasks:

    python -m xdlm.evaluation.harness run --model xdlm --model_args model=pocket,steps=32 --tasks wikitext

Arguments are those of `load`, the fields of `WriterSettings`, whatever the sampler alone understands
(block_length=32), `draws` of a likelihood, the longest `context`, and `k` to sample as a model of mixed
noise of that ratio. They say how answers are written: a task's own temperature is not looked at. Without
`--device` a GPU is used where there is one.

`loglikelihood` is a lower bound on log p for a model of noise, from `draws` draws, and exact for an
autoregressive one; its second part, whether the answer is the greedy one, is told by the latter alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, field, make_dataclass
from functools import cache
from typing import Any, get_type_hints

from xdlm.config import from_tree
from xdlm.errors import UserError
from xdlm.evaluation.conditional import Answer
from xdlm.evaluation.generation import mean
from xdlm.evaluation.harness.responder import Prompt, Reply, Responder
from xdlm.evaluation.harness.settings import WriterSettings
from xdlm.sampling import How
from xdlm.tokens.chat import ChatTemplate

NAME = "xdlm"
MISSING = "benchmarks need lm-eval: pip install 'xdlm[eval]'"


@cache
def register() -> Any:
    """The class, made known to lm-eval. It is made here since its base is imported when it is needed."""
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise UserError(MISSING) from error
    return register_model(NAME)(type("XdlmModel", (Answering, LM), {"__doc__": Answering.__doc__}))


class Answering:
    """Hands lm-eval's requests to a `Responder`, and keeps its replies and answers for who wants to know
    more than lm-eval takes."""

    def __init__(
        self,
        model: str | Responder = "pocket",
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **arguments: Any,
    ) -> None:
        """lm-eval gives every model a batch size; how much goes through this one together is up to
        `batch_tokens`."""
        super().__init__()
        self.replies: list[Reply] = []
        self.answers: list[Answer] = []
        self._template: ChatTemplate | None = None
        self.responder = model if isinstance(model, Responder) else _opened(model, arguments)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        repeats: Counter[str] = Counter()
        prompts = []
        for request in requests:
            text, options = request.args
            most = options.get("max_gen_toks")
            prompts.append(Prompt(text, _stops(options), most, repeats[text]))
            repeats[text] += 1
        replies = self.responder.write(prompts)
        self.replies += replies
        return [reply.text for reply in replies]

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        found = self.responder.log_likelihood([request.args for request in requests])
        self.answers += found
        return [(answer.log_p, answer.greedy) for answer in found]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        found = self.responder.rolling([request.args[0] for request in requests])
        self.answers += found
        return [answer.log_p for answer in found]

    def apply_chat_template(
        self, chat_history: list[Any], add_generation_prompt: bool = True
    ) -> str:
        if self._template is None:
            self._template = self.responder.template()
        return self._template.render(chat_history, answered=not add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """Tells the prompts of one template from those of another."""
        return self.responder.model.tokenizer.digest

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval puts beside its results: what the figures are, and how sure."""
        info: dict[str, Any] = {"writing": asdict(self.responder.writing)}
        if (noise := self.responder.model.sampled_as) is not None:
            info["sampled_as"] = asdict(noise)
        if self.answers:
            exact = self.responder.model.process is None
            draws = self.responder.draws
            info["log_likelihood"] = "exact" if exact else f"lower bound from {draws} draws"
            info["log_likelihood_stderr"] = mean([a.stderr for a in self.answers]).value
        return info


_LOADING = {"device": str, "weights": str, "precision": str}
_ASKING = {"draws": int, "context": int}
_WRITING = {
    name: hint for name, hint in get_type_hints(WriterSettings).items() if name != "options"
}
#: What one sampler alone understands.
_SAMPLING = {name: hint for name, hint in get_type_hints(How).items() if name not in _WRITING}
_Arguments = make_dataclass(
    "_Arguments",
    [
        (name, hint, field(default=None))
        for name, hint in (_LOADING | _ASKING | _WRITING | _SAMPLING | {"k": float}).items()
    ],
)
#: What lm-eval's command says where nobody has said anything.
_UNASKED = "cuda:0"


def _opened(name: str, arguments: Mapping[str, Any]) -> Responder:
    """A model by name, asked as the arguments say."""
    from xdlm import load

    given = {each: value for each, value in arguments.items() if value is not None}
    given = {each: value for each, value in given.items() if (each, value) != ("device", _UNASKED)}
    said = vars(from_tree(_Arguments, given, "model_args"))

    def of(names: Mapping[str, Any]) -> dict[str, Any]:
        return {each: said[each] for each in names if each in given}

    model = load(name, **of(_LOADING))
    model = model if said["k"] is None else model.mixed(said["k"])
    return Responder(model, WriterSettings(**of(_WRITING), options=of(_SAMPLING)), **of(_ASKING))


def _stops(options: Mapping[str, Any]) -> tuple[str, ...]:
    until = options.get("until") or ()
    return (until,) if isinstance(until, str) else tuple(until)
