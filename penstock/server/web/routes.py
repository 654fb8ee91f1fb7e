"""The page for browsers: files of this package, the same for everybody. What it shows comes over the API.

It loads nothing from elsewhere, runs no script but its own, and no other page may frame it.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import format_value
from penstock.server.document import gives
from penstock.server.errors import HttpError

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_OF_DOCS = frozenset({"docs.js", "api.js", "style.css", "icon.svg", "vendor/preact.js", "vendor/LICENSES.txt"})
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ALWAYS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304 unless it has changed
    "Vary": "Accept-Encoding, Accept",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent: its type, its bytes as they are and compressed, and a tag that changes with them."""

    media_type: str
    plain: bytes
    compressed: bytes
    tag: str


@cache
def page_files() -> dict[str, PageFile]:
    """All files of the page by their names below its folder; takes about a tenth of a second, once."""
    found: dict[str, PageFile] = {}
    for path in sorted(FOLDER.rglob("*.*")):
        plain = path.read_bytes()
        tag = f'"{hashlib.sha256(plain).hexdigest()[:32]}"'
        compressed = gzip.compress(plain, mtime=0)
        found[path.relative_to(FOLDER).as_posix()] = PageFile(_TYPES[path.suffix], plain, compressed, tag)
    return found


def page_response(request: Request, name: str) -> Response:
    """A file of the page; raises HttpError 404 for any other name."""
    file = page_files().get(name)
    if file is None:
        raise HttpError(404, f"The page has no file {format_value(name)}.", code="unknown_route")
    headers = {**_ALWAYS, "ETag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    zipped = "gzip" in request.headers.get("accept-encoding", "")
    if zipped:
        headers["Content-Encoding"] = "gzip"
    return Response(file.compressed if zipped else file.plain, media_type=file.media_type, headers=headers)


def wants_page(request: Request) -> bool:
    """Whether a client asks for pages, as browsers do."""
    return "text/html" in request.headers.get("accept", "")


def web_router(*, page: bool) -> APIRouter:
    """The description of the API for people, and the files of it and of the page; without `page`, of it alone."""
    router = APIRouter()

    @router.get("/docs", summary="This API as a page", openapi_extra=gives("text/html"))
    async def docs(request: Request) -> Response:
        return page_response(request, "docs.html")

    @router.get("/web/{name:path}", summary="A file of a page for browsers", openapi_extra=gives("text/javascript"))
    async def file(request: Request, name: str) -> Response:
        return page_response(request, name if page or name in _OF_DOCS else "")

    return router
