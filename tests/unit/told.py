"""A model that gives prepared answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from xdlm.api import Completion, Model


class Told(Model):
    """A model that gives prepared answers."""

    answer: Callable[[list[int]], str]

    def complete(self, prompts, **how):  # type: ignore[no-untyped-def]
        end = self.tokenizer.eos_id
        rows = [self.tokenizer.encode(self.answer(prompt)) for prompt in prompts]
        return [
            Completion(ids[: ids.index(end)] if end in ids else ids, "", end in ids, 3)
            for ids in rows
        ]


def told(model: Model, answer: Callable[[list[int]], str]) -> Told:
    one = Told(**{each.name: getattr(model, each.name) for each in fields(model)})
    object.__setattr__(one, "answer", answer)
    return one
