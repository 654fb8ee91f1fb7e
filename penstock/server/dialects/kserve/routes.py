"""The KServe dialect's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock import __version__
from penstock.config.errors import param_names
from penstock.engine.api import EngineState
from penstock.server.active_call import ActiveCall, EventStream, event, open_call
from penstock.server.body import check_type, read_body, translated, validate, whole_body
from penstock.server.connected import while_connected
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.kserve.schema import KserveGenerateBody, KserveInferBody
from penstock.server.dialects.kserve.tensors import binary_texts
from penstock.server.dialects.kserve.translate import SENT, KserveCall, generate_call, infer_call
from penstock.server.document import EVENTS, gives, takes
from penstock.server.encoding import encode_json, json_answer, json_response
from penstock.server.errors import HttpError, bad_value, describe, not_ready
from penstock.server.paths import KSERVE_MODEL
from penstock.server.shapes import check_one_answer
from penstock.server.strict_json import parse_json

_VERSION = "1"
_HEADER = "inference-header-content-length"
_BINARY = "application/octet-stream"
_Answer = Callable[[Request, str], Awaitable[Response]]


def kserve_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()
    _add_health(router, context)

    async def generate(request: Request, model: str) -> Response:
        found, call, active = await opened(request, model)
        async with active:
            texts = await while_connected(_texts(call, active), request.receive, context.lifecycle)
        return await json_answer(_told(found, call, texts if len(texts) > 1 else texts[0]))

    async def generate_stream(request: Request, model: str) -> Response:
        found, call, active = await opened(request, model, stream=True)
        return EventStream(
            _events(found, call, active),
            active.aclose,
            context.lifecycle,
            failed=lambda error: event(describe(error, request.scope)[1]),
        )

    async def opened(
        request: Request, name: str, *, stream: bool = False
    ) -> tuple[ModelContext, KserveCall, ActiveCall]:
        body = await read_body(request, KserveGenerateBody)
        model = await context.model(request, name)
        model.require_ready()
        with param_names(SENT):
            call = await translated(request, generate_call, body, model.frontend.text.defaults)
        if stream:
            check_one_answer(call.completion.requests[0].sampling.n)
        return model, call, await _open(request, model, call)

    async def infer(request: Request, model: str) -> Response:
        check_type(request, allowed=("application/json", _BINARY))
        raw, head = await whole_body(request), _head_bytes(request)
        body = await translated(request, lambda: validate(KserveInferBody, parse_json(raw[:head])))
        found = await context.model(request, model)
        found.require_ready()
        tail = memoryview(raw)[len(raw) if head is None else head :]
        with param_names(SENT):
            call = await translated(request, lambda: infer_call(body, tail, found.frontend.text.defaults))
        async with await _open(request, found, call) as active:
            texts = await while_connected(_texts(call, active), request.receive, context.lifecycle)
        return await _inferred(found, call, texts)

    _add(router, "generate", "Continue a text, as Triton", takes(KserveGenerateBody), generate)
    _add(router, "generate_stream", "The same in events", takes(KserveGenerateBody, EVENTS), generate_stream)
    _add(router, "infer", "Continue texts, as tensors", takes(KserveInferBody, _BINARY), infer)
    return router


def _add(router: APIRouter, name: str, summary: str, about: dict[str, Any], answer: _Answer) -> None:
    """A route of a model, and of a version of it."""

    async def unversioned(request: Request, model: str) -> Response:
        return await answer(request, model)

    async def versioned(request: Request, model: str, version: str) -> Response:
        _check_version(model, version)
        return await answer(request, model)

    kind = "get" if name in ("", "ready") else "post"
    add = getattr(router, kind)
    tail = f"/{name}" if name else ""
    add(f"/v2/models/{KSERVE_MODEL}/versions/{{version}}{tail}", summary=summary, openapi_extra=about)(versioned)
    add(f"/v2/models/{KSERVE_MODEL}{tail}", summary=summary, openapi_extra=about)(unversioned)


def _check_version(model: str, version: str) -> None:
    if version != _VERSION:
        message = f"{model} has no version {version!r}; the one there is: {_VERSION}."
        raise HttpError(404, message, param="version", code="unknown_version")


def _add_health(router: APIRouter, context: ServerContext) -> None:
    json = gives("application/json")

    @router.get("/v2", summary="What the server is, as KServe", openapi_extra=json)
    async def about() -> Response:
        extensions = ["generate", "binary_tensor_data"]
        return json_response({"name": "penstock", "version": __version__, "extensions": extensions})

    @router.get("/v2/health/live", summary="As /livez", openapi_extra=json)
    async def live() -> Response:
        if context.models.state is EngineState.STOPPED and not context.lifecycle.draining:
            raise not_ready("The engine has stopped.", "stopped")
        return json_response({"live": True})

    @router.get("/v2/health/ready", summary="As /readyz", openapi_extra=json)
    async def ready() -> Response:
        if context.models.state is not EngineState.READY or context.lifecycle.draining:
            raise not_ready("The server is not ready.", "not_ready")
        return json_response({"ready": True})

    async def model_ready(request: Request, model: str) -> Response:
        if model not in context.models.names():
            raise context.models.unknown(model)
        if context.models.host is None:
            (await context.model(request, model)).require_ready()
        return json_response({"name": model, "ready": True})

    async def metadata(request: Request, model: str) -> Response:
        if model not in context.models.names():
            raise context.models.unknown(model)
        tensors = {kind: [{"name": f"text_{kind}", "datatype": "BYTES", "shape": [-1]}] for kind in ("input", "output")}
        told = {"name": model, "versions": [_VERSION], "platform": "penstock"}
        return json_response({**told, "inputs": tensors["input"], "outputs": tensors["output"]})

    _add(router, "ready", "Whether a model takes requests", json, model_ready)
    _add(router, "", "What a model takes and gives", json, metadata)


async def _open(request: Request, model: ModelContext, call: KserveCall) -> ActiveCall:
    completion = call.completion
    with param_names(SENT):
        return await open_call(request, model, completion.requests, completion.beams, completion.best_of)


def _head_bytes(request: Request) -> int | None:
    """How much of a body is JSON, where tensors follow it."""
    given = request.headers.get(_HEADER)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit()) or len(given) > 12:
        raise bad_value(_HEADER, given, "a number of bytes")
    return int(given)


async def _texts(call: KserveCall, active: ActiveCall) -> list[str]:
    """The outputs, the answers to a prompt one after the other."""
    n = call.completion.n
    pieces: list[list[str]] = [[prompt] if call.echo else [] for prompt in call.prompts for _ in range(n)]
    async for index, delta in active.deltas():
        pieces[index * n + delta.index].append(delta.text)
    return ["".join(each) for each in pieces]


def _told(model: ModelContext, call: KserveCall, text: str | list[str]) -> dict[str, Any]:
    head = {"id": call.id} if call.id is not None else {}
    return {**head, "model_name": model.model, "model_version": _VERSION, "text_output": text}


async def _events(model: ModelContext, call: KserveCall, active: ActiveCall) -> AsyncIterator[bytes]:
    """An event for each piece of text."""
    begun = not call.echo
    async for _, delta in active.deltas():
        if delta.text or delta.finish_reason is not None:
            yield event(_told(model, call, delta.text if begun else call.prompts[0] + delta.text))
            begun = True


async def _inferred(model: ModelContext, call: KserveCall, texts: list[str]) -> Response:
    """The outputs as a tensor, its data in JSON or behind it."""
    output: dict[str, Any] = {"name": "text_output", "datatype": "BYTES", "shape": [len(texts)]}
    head = {"id": call.id} if call.id is not None else {}
    body = {**head, "model_name": model.model, "model_version": _VERSION, "outputs": [output]}
    if not call.binary:
        output["data"] = texts
        return await json_answer(body)
    data = binary_texts(texts)
    output["parameters"] = {"binary_data_size": len(data)}
    json = encode_json(body)
    return Response(json + data, headers={_HEADER: str(len(json))}, media_type=_BINARY)
