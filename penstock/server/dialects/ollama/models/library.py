"""Ollama's routes that change the library: pull, push, create, copy, delete."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.config import limits
from penstock.config.errors import (
    CheckpointError,
    ConfigError,
    PenstockError,
    RequestError,
    TemplateError,
    format_value,
)
from penstock.config.quantisation import GGUF_FILE_TYPES
from penstock.host.model_host import ModelHost
from penstock.host.shelf import Parts, Shelf, Told
from penstock.server.active_call import EventStream
from penstock.server.auth import AdminKeys
from penstock.server.body import read_body
from penstock.server.connected import while_connected
from penstock.server.context import ServerContext
from penstock.server.dialects.ollama.models.blobs import add_blobs
from penstock.server.dialects.ollama.models.library_threads import AT_ONCE, LibraryThreads, dealt
from penstock.server.document import takes
from penstock.server.encoding import json_response
from penstock.server.errors import HttpError, bad_value
from penstock.server.shapes import Loose, either

_Name = Annotated[str, Field(min_length=1, max_length=limits.MAX_NAME_CHARS)]
_OneOfTwo = Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)]  # clients send the other one empty
_GIVEN: dict[str, Any] = {"type": "string", "minLength": 1}
_NAMED = either({"model": _GIVEN}, {"name": _GIVEN})
_Digest = Annotated[str, Field(max_length=100)]
_Files = Annotated[dict[_Name, _Digest], Field(max_length=limits.MAX_FILES_OF_A_MODEL)]
_LINES = "application/x-ndjson"
_UNREACHED = "The registry cannot be reached, or does not do what it is asked."
_PROGRESS_S = 0.2  # between two lines of one work


class PullBody(Loose):
    """`/api/pull` and `/api/push`."""

    model_config = _NAMED

    model: _OneOfTwo | None = None
    name: _OneOfTwo | None = None
    insecure: bool = False
    stream: bool = True


class CreateBody(Loose):
    """`/api/create`: another model, or files that were sent, with texts of its own."""

    model_config = _NAMED

    model: _OneOfTwo | None = None
    name: _OneOfTwo | None = None
    from_: Annotated[_OneOfTwo | None, Field(alias="from")] = None
    files: _Files | None = None
    adapters: _Files | None = None
    quantize: _OneOfTwo | None = None
    quantization: _OneOfTwo | None = None
    template: str | None = None
    system: str | None = None
    license: str | list[str] | None = None
    parameters: dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None
    stream: bool = True


class CopyBody(Loose):
    """`/api/copy`."""

    source: _Name
    destination: _Name


class DeleteBody(Loose):
    """`/api/delete`."""

    model_config = _NAMED

    model: _OneOfTwo | None = None
    name: _OneOfTwo | None = None


_OPENAIS_CLIENT: Final = "x-stainless-lang"
"""A header of OpenAI's clients, to whom a route means deleting that means unloading to Xinference's."""
LIBRARY_BODIES = (PullBody, CreateBody, CopyBody, DeleteBody)
Work = Callable[[Told, threading.Event], object]


def library_router(context: ServerContext, host: ModelHost, shelf: Shelf, keys: AdminKeys) -> APIRouter:
    """The routes, for those who may load models."""
    router, threads = APIRouter(), LibraryThreads(dealt(AT_ONCE, context.siblings))
    works = _Works(context, host, threads)

    def route(path: str, summary: str, body: type[Loose], *media_types: str) -> Callable[..., Any]:
        return router.post(path, summary=summary, openapi_extra=takes(body, *media_types))

    def exchanging() -> dict[str, Any]:
        told = takes(PullBody, _LINES)
        return {**told, "responses": {**told["responses"], "502": {"description": _UNREACHED}}}

    def add_exchange(name: str, doing: str, exchange: Callable[[str, bool, Told, threading.Event], object]) -> None:
        @router.post(f"/api/{name}", summary=f"{name.capitalize()} a model", openapi_extra=exchanging())
        async def handler(request: Request) -> Response:
            body = await _read(request, PullBody, keys)
            model = _named(body.model, body.name)
            work = lambda told, stop: exchange(model, body.insecure, told, stop)  # noqa: E731
            return await works.answer(request, work, f"{doing} {model}", stream=body.stream)

    add_exchange("pull", "pulling", shelf.pull)
    add_exchange("push", "pushing", shelf.push)

    @route("/api/create", "Create a model", CreateBody, _LINES)
    async def create(request: Request) -> Response:
        body = await _read(request, CreateBody, keys)
        name = _named(body.model, body.name)
        texts, parts = _texts(body), _parts(body)
        work = lambda told, stop: shelf.create(name, parts, texts, told, stop)  # noqa: E731
        return await works.answer(request, work, f"creating {name}", stream=body.stream)

    add_blobs(router, shelf, keys, context.siblings)

    @route("/api/copy", "Copy a model", CopyBody)
    async def copy(request: Request) -> Response:
        body = await _read(request, CopyBody, keys)
        await _done(threads.start(lambda: shelf.copy(body.source, body.destination)))
        await host.refresh(anew=True)
        return Response(status_code=200)

    _add_deleting(router, context, host, shelf, keys, threads)
    return router


def _add_deleting(
    router: APIRouter, context: ServerContext, host: ModelHost, shelf: Shelf, keys: AdminKeys, threads: LibraryThreads
) -> None:
    """The routes that delete models, as Ollama's and OpenAI's clients ask for it."""

    async def unload(request: Request, name: str) -> None:
        unloading = host.unload(await host.find(name))
        await while_connected(unloading, request.receive, context.lifecycle)

    async def remove(request: Request, name: str) -> None:
        listed = await _done(threads.start(lambda: shelf.canonical(name)))
        if listed is not None and listed in host.names:
            await unload(request, listed)
        await _done(threads.start(lambda: shelf.remove(name)))
        await host.refresh(anew=True)

    @router.delete("/api/delete", summary="Delete a model", openapi_extra=takes(DeleteBody))
    async def delete(request: Request) -> Response:
        body = await _read(request, DeleteBody, keys)
        await remove(request, _named(body.model, body.name))
        return Response(status_code=200)

    @router.delete("/v1/models/{model:path}", summary="Delete a model, as OpenAI; or terminate it, as Xinference")
    async def delete_or_terminate(request: Request, model: str) -> Response:
        keys.check_admin(request.headers)
        if _OPENAIS_CLIENT not in request.headers:
            await unload(request, model)
            return json_response(None)
        if await _done(threads.start(lambda: shelf.canonical(model))) is None:
            if model in host.names:
                told = "is of a file or folder of this server's own, and is not deleted; /models/unload ends it"
                raise HttpError(403, f"The model {format_value(model)} {told}.", param="model", code="not_in_library")
            raise context.models.unknown(model)
        await remove(request, model)
        return json_response({"id": model, "object": "model", "deleted": True})


async def _read(request: Request, body: type[Any], keys: AdminKeys) -> Any:
    keys.check_admin(request.headers)
    return await read_body(request, body, any_type="origin" not in request.headers)


def _named(*names: str | None) -> str:
    for name in names:
        if name:
            return name
    raise RequestError("model is required.", param="model", code="missing_required_parameter")


def _parts(body: CreateBody) -> Parts:
    """What the model is made of; `from` comes before `files`, as in Ollama."""
    if not body.from_ and not body.files:
        raise RequestError("neither from nor files says what the model is made of.", param="from")
    quantize = (body.quantize or body.quantization or "").lower() or None
    if quantize is not None and quantize not in GGUF_FILE_TYPES:
        raise bad_value("quantize", quantize, ", ".join(GGUF_FILE_TYPES))
    files = {} if body.from_ else body.files or {}
    return Parts(body.from_ or None, files, body.adapters or {}, quantize)


def _texts(body: CreateBody) -> dict[str, Any]:
    """What a Modelfile of this body would say, as its reader has it."""
    license = body.license or []
    turns = body.messages or []
    if not all(isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str) for turn in turns):
        raise RequestError("messages are turns with a role and a content.", param="messages")
    params = dict(body.parameters or {})
    if isinstance(params.get("stop"), str):
        params["stop"] = [params["stop"]]
    return {
        "template": body.template,
        "system": body.system,
        "licenses": [license] if isinstance(license, str) else license,
        "params": params,
        "messages": [{"role": turn["role"], "content": turn["content"]} for turn in turns],
    }


async def _done(work: asyncio.Future[Any]) -> Any:
    """What work in a thread gives; its refusals with the status that says whose fault they are."""
    try:
        return await work
    except PenstockError as error:
        raise _refused(error) from None


def _refused(error: PenstockError) -> Exception:
    if isinstance(error, RequestError):
        return error
    return HttpError(400 if isinstance(error, (ConfigError, CheckpointError, TemplateError)) else 502, str(error))


class _Works:
    """Runs works for clients, each of whom may leave before its end."""

    def __init__(self, context: ServerContext, host: ModelHost, threads: LibraryThreads) -> None:
        self._context = context
        self._host = host
        self._threads = threads

    async def answer(self, request: Request, work: Work, status: str, *, stream: bool) -> Response:
        """A line for each progress and at the end; or the end alone."""
        stop, lifecycle = threading.Event(), self._context.lifecycle
        if not stream:
            ended = self._threads.start(lambda: work(lambda done, total: None, stop))
            try:
                await while_connected(_done(ended), request.receive, lifecycle)
            finally:
                stop.set()
            await self._host.refresh(anew=True)
            return json_response({"status": "success"})
        progress = _Progress()
        task = self._threads.start(lambda: work(progress.told, stop))
        task.add_done_callback(progress.ended)

        async def close() -> None:
            stop.set()

        lines = _lines(self._host, progress, task, status)
        return EventStream(lines, close, lifecycle, failed=_failed, keepalive=b"", media_type=_LINES)


def _failed(error: BaseException) -> bytes:
    return _line({"error": str(error)})


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


class _Progress:
    """How far a work is, told in its thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self.last = (0, 0)

    def told(self, done: int, total: int) -> None:
        self.last = (done, total)
        self._loop.call_soon_threadsafe(self.news.set)

    def ended(self, task: asyncio.Future[Any]) -> None:
        if not task.cancelled():
            task.exception()  # told, or nobody listens
        self.news.set()


async def _lines(host: ModelHost, progress: _Progress, task: asyncio.Future[Any], status: str) -> AsyncIterator[bytes]:
    yield _line({"status": status})
    digest = f"sha256:{hashlib.sha256(status.encode()).hexdigest()}"  # clients draw a bar for each, and cut it
    told, ended = (0, 0), False
    try:
        while not ended:
            await progress.news.wait()
            progress.news.clear()
            ended = task.done()  # before it is looked how far it came: what it told last is told
            done, total = progress.last
            if total and (done, total) != told:
                told = (done, total)
                yield _line({"status": status, "digest": digest, "completed": done, "total": total})
                await asyncio.wait((task,), timeout=_PROGRESS_S)
        await task
    except PenstockError as error:
        yield _line({"error": str(error)})
        return
    await host.refresh(anew=True)
    yield _line({"status": "success"})
