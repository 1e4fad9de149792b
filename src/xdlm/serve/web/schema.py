"""What the server says of itself in /openapi.json: its models and limits, and every error as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from xdlm.serve.service import Service


class Failure(BaseModel):
    """Why a request failed."""

    message: str
    type: str
    param: str | None
    code: int


class Failed(BaseModel):
    """An error, as OpenAI's clients read it."""

    error: Failure


#: What any route that does work may answer.
FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": Failed, "description": what}
    for status, what in {
        400: "The request cannot be answered, and why.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        429: "The queue is full; Retry-After says when to try again.",
        503: "The server is shutting down.",
        504: "It took too long.",
    }.items()
}


def describe(app: FastAPI, service: Service) -> None:
    """Have the application tell the names of its models and its limits."""
    bounds = service.bounds
    limits = {"steps": bounds.max_steps, "n": bounds.max_n, "max_tokens": bounds.max_length}

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(
                title=app.title, version=app.version, routes=app.routes,
                description="Discrete diffusion language models: completions, infilling, scores.",
            )  # fmt: skip
            for properties in _properties(app.openapi_schema):
                if "model" in properties:
                    properties["model"] |= {"enum": [*service.served, None]}
                for name, most in limits.items():
                    if name in properties:
                        _bound(properties[name], most)
                _allow_null(properties)
            _forget_422(app.openapi_schema)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _properties(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for part in schema["components"]["schemas"].values():
        if "properties" in part:
            yield part["properties"]


def _bound(field: dict[str, Any], most: int) -> None:
    for kind in field.get("anyOf", [field]):
        if kind.get("type") == "integer":
            kind["maximum"] = most


def _allow_null(properties: dict[str, Any]) -> None:
    """What has a default may be null, which means the same as leaving it out."""
    for name, field in properties.items():
        if field.get("default") is not None and "anyOf" not in field:
            told = {key: field.pop(key) for key in ("default", "title") if key in field}
            properties[name] = {"anyOf": [field, {"type": "null"}], **told}


def _forget_422(schema: dict[str, Any]) -> None:
    """What does not fit the schema is a 400 here, like everything else that is wrong with a request."""
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
