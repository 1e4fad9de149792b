"""What clients may send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from xdlm.sampling import How

#: Settings of OpenAI's that nothing here would obey, and what asks for nothing, beside null.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (),
    "suffix": ("",),
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
MAX_TEXT = 200_000

Text = Annotated[str, Field(max_length=MAX_TEXT)]
TokenId = Annotated[int, Field(ge=0, le=10_000_000)]


class Body(BaseModel):
    """A setting that nothing would read is an error, as everywhere; null is one that was not given."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields = cls.model_fields
        return {
            name: value for name, value in given.items()
            if value is not None or name not in fields or fields[name].is_required()
        }  # fmt: skip


class StreamOptions(Body):
    include_usage: bool = Field(
        False, description="One more event at the end, without choices, that counts the tokens."
    )


class Streaming(Body):
    stream: bool = Field(False, description="Tell every step as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="With stream alone.")

    @model_validator(mode="after")
    def _only_of_a_stream(self) -> Streaming:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options without stream has no meaning; leave it out")
        return self

    @property
    def counts_tokens(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class Sampling(Body):
    model: str | None = Field(None, description="A name from /v1/models; by default the first.")
    n: int = Field(1, ge=1, le=1024, description="How many texts.")
    seed: int | None = Field(
        None,
        ge=0,
        lt=1 << 63,
        description="Same seed and settings, same text; by default by chance.",
    )
    steps: int | None = Field(
        None, ge=1, description="Sampling steps; by default 32, or the most that the server allows."
    )
    sampler: Literal["ancestral", "confidence"] = "ancestral"
    temperature: float = Field(1.0, ge=0, le=1000, description="0 takes the most likely token.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus.")
    k: float | None = Field(
        None, ge=0, le=1, description="Sample as a model of mixed noise of this ratio."
    )
    last: Literal["sample", "argmax"] | None = Field(None, description="ancestral: the last step.")
    block_length: int | None = Field(None, ge=1, description="confidence: tokens of a block.")
    guidance: float | None = Field(None, ge=0, le=100, description="confidence: guidance scale.")
    confidence: Literal["token", "entropy", "margin", "random"] | None = None
    user: Any = Field(None, description="Ignored; clients send it.")

    def how(self) -> dict[str, Any]:
        """The sampler's settings that were given."""
        given = {name: getattr(self, name, None) for name in How.__annotations__}
        return {name: value for name, value in given.items() if value is not None}


def _nothing(name: str) -> Any:
    neutral = list(_NEUTRAL[name])
    return Field(None, description="Not supported.", json_schema_extra={"enum": [None, *neutral]})


class Completion(Sampling, Streaming):
    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=64)] = Field(
        "", examples=["It was"]
    )
    max_tokens: int = Field(64, ge=1, description="Tokens to write behind the prompt.")
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = Field(
        None, description="The text ends before the first of these."
    )
    best_of: int | None = Field(None, description="Not supported: only the value of n.")
    logprobs: Any = _nothing("logprobs")
    suffix: Any = _nothing("suffix")
    echo: Any = _nothing("echo")
    presence_penalty: Any = _nothing("presence_penalty")
    frequency_penalty: Any = _nothing("frequency_penalty")
    logit_bias: Any = _nothing("logit_bias")

    @field_validator("best_of")
    @classmethod
    def _all_are_told(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of not in (None, info.data.get("n", best_of)):
            raise ValueError("all texts that are written are told; leave it out, or give that of n")
        return best_of

    @field_validator(*_NEUTRAL)
    @classmethod
    def _asks_for_nothing(cls, value: Any, info: ValidationInfo) -> None:
        if value is not None and value not in _NEUTRAL[str(info.field_name)]:
            raise ValueError("not supported here; leave it out")

    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]


class BlankBody(Body):
    choices: Annotated[list[Text], Field(min_length=1, max_length=1000)] | None = None
    regex: Annotated[str, Field(max_length=2000)] | None = None


class Holes(Sampling):
    template: Text = Field(
        description="Text with holes: <mask:12> is a hole of 12 tokens.",
        json_schema_extra={"pattern": r"<mask:\d+>"},
        examples=["The <mask:4> said <mask:3>."],
    )
    forced: dict[Annotated[str, Field(pattern=r"^\d{1,7}$")], TokenId | str] = Field(
        default_factory=dict, description="Tokens at positions of the row, by number or text."
    )
    banned: Annotated[list[TokenId | str], Field(max_length=4096)] = Field(
        default_factory=list, description="Tokens that are never written, by number or text."
    )
    blanks: Annotated[list[BlankBody | None], Field(max_length=256)] = Field(
        default_factory=list, description="What each hole may hold, in their order."
    )


class Infill(Holes, Streaming):
    trajectory: bool = Field(
        False, description="Answer with every step, as xdlm sample records it."
    )


class Film(Holes):
    format: Literal["html", "json", "svg", "gif"] = Field(
        "json", description="A page that stands alone, data, or a picture of the first text."
    )


class Score(Body):
    model: str | None = None
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=16)] = Field(
        examples=["It was a dark night."]
    )
    draws: int = Field(16, ge=2, le=64, description="Random times and corruptions per row.")
    seed: int = Field(0, ge=0, lt=1 << 31)
