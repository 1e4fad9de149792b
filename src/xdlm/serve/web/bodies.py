"""What clients may send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_HOW = (
    "sampler",
    "steps",
    "temperature",
    "top_p",
    "last",
    "block_length",
    "guidance",
    "confidence",
)
MAX_TEXT = 200_000

Text = Annotated[str, Field(max_length=MAX_TEXT)]
TokenId = Annotated[int, Field(ge=0, le=10_000_000)]


class Body(BaseModel):
    """A setting that nothing would read is an error, as everywhere."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Sampling(Body):
    model: str | None = Field(None, description="A name from /v1/models; by default the first.")
    n: int = Field(1, ge=1, le=1024, description="How many texts.")
    seed: int | None = Field(
        None,
        ge=0,
        lt=1 << 63,
        description="Same seed and settings, same text; by default by chance.",
    )
    steps: int = Field(32, ge=1, description="Sampling steps.")
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
    user: str | None = Field(None, description="Ignored; clients send it.")

    def how(self) -> dict[str, Any]:
        """The sampler's settings that were given."""
        given = {name: getattr(self, name) for name in _HOW}
        return {name: value for name, value in given.items() if value is not None}


class Completion(Sampling):
    stream: bool = Field(False, description="Tell every step as server-sent events.")
    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=64)] = Field(
        "", examples=["It was"]
    )
    max_tokens: int = Field(64, ge=1, description="Tokens to write behind the prompt.")
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = Field(
        None, description="The text ends before the first of these."
    )

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


class Infill(Holes):
    stream: bool = Field(False, description="Tell every step as server-sent events.")
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
