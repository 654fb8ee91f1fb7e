"""Ollama's routes for files that models are made of: each goes to disk as it comes, under its digest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from penstock.config.errors import CheckpointError, ConfigError
from penstock.host.shelf import Shelf, Upload
from penstock.server.auth import AdminKeys
from penstock.server.dialects.ollama.models.library_threads import dealt
from penstock.server.errors import HttpError
from penstock.server.siblings import Siblings

_AT_ONCE = 4  # of a whole server; further ones wait, with their bytes unread
_PIECE = 1 << 20
_Digest = Annotated[str, Path(json_schema_extra={"pattern": "^sha256[:-][0-9a-f]{64}$"})]  # checked by the shelf
_TYPES = ("application/json", "application/octet-stream")  # which pages of other origins cannot send unasked


def add_blobs(router: APIRouter, shelf: Shelf, keys: AdminKeys, siblings: Siblings | None) -> None:
    """Adds the routes, for those who may load models."""
    places = asyncio.Semaphore(dealt(_AT_ONCE, siblings))

    @router.head("/api/blobs/{digest}", summary="Whether a file of a model is here")
    async def head(request: Request, digest: _Digest) -> Response:
        keys.check_admin(request.headers)
        if not await _to_disk(shelf.has_file, digest):
            raise HttpError(404, f"there is no blob {digest}.", code="not_found")
        return Response(status_code=200)

    @router.post("/api/blobs/{digest}", summary="Send a file of a model", status_code=201)
    async def send(request: Request, digest: _Digest) -> Response:
        keys.check_admin(request.headers)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if "origin" in request.headers and kind not in _TYPES:
            raise HttpError(415, f"Content-Type is to be one of {', '.join(_TYPES)}.", code="unsupported_media_type")
        size = request.headers.get("content-length")
        async with places:
            if await _to_disk(shelf.has_file, digest):
                return Response(status_code=200)
            upload = await _to_disk(shelf.upload, digest, None if size is None else int(size))
            try:
                await _receive(request, upload)
                await _to_disk(upload.finish)
            finally:
                await asyncio.to_thread(upload.discard)
        return Response(status_code=201)


async def _receive(request: Request, upload: Upload) -> None:
    pieces = bytearray()
    async for piece in request.stream():
        pieces += piece
        if len(pieces) >= _PIECE:
            await _to_disk(upload.write, bytes(pieces))
            pieces.clear()
    await _to_disk(upload.write, bytes(pieces))


async def _to_disk(work: Callable[..., Any], *args: Any) -> Any:
    """What waits for the disk, in a thread."""
    try:
        return await asyncio.to_thread(work, *args)
    except CheckpointError as error:
        raise HttpError(400, str(error), code="invalid_digest") from None
    except ConfigError as error:
        raise HttpError(507, str(error), code="insufficient_storage") from None
