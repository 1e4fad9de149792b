"""The page at `/`: a few files of this package, and nothing from elsewhere."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from xdlm.report.html import shared_modules, theme

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """The page and its parts, read once."""
    router, parts = APIRouter(include_in_schema=False), _parts()

    @router.get("/")
    async def page() -> Response:
        return _file("index.html", parts["index.html"])

    @router.get("/page/{name}")
    async def part(name: str) -> Response:
        if name not in parts:
            raise HTTPException(404, "there is no such file")
        return _file(name, parts[name])

    return router


def _parts() -> dict[str, bytes]:
    folder = resources.files("xdlm.serve.web").joinpath("page")
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    return {**files, **shared_modules(), "theme.css": theme().encode()}


def _file(name: str, content: bytes) -> Response:
    kind = _TYPES[name.rsplit(".", 1)[-1]]
    return Response(content, media_type=kind, headers=_HEADERS)
