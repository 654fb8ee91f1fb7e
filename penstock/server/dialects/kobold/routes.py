"""The Kobold dialect's routes."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from penstock.config.errors import param_names
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.engine.frontend import Frontend
from penstock.server.active_call import ActiveCall, EventStream, event, open_call
from penstock.server.auth import owner_of
from penstock.server.body import read_body, translated
from penstock.server.connected import while_connected
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.kobold.reply import KoboldReply, RunningReplies
from penstock.server.dialects.kobold.schema import GenkeyBody, KoboldBody, TokenCountBody
from penstock.server.dialects.kobold.translate import DEFAULT_LENGTH, SENT, KoboldCall, kobold_call
from penstock.server.document import EVENTS, gives, takes
from penstock.server.encoding import json_answer, json_response, made_answer
from penstock.server.errors import describe
from penstock.server.shapes import check_one_answer

_CHECK, _ABORT = "what is written so far", "abort, as Kobold"
_API = "1.2.5"  # of KoboldAI, which clients compare
_CPP = "1.110"  # of KoboldCpp, the same
_Body = TypeVar("_Body", bound=BaseModel)


async def _read(request: Request, model: type[_Body]) -> _Body:
    return await read_body(request, model, any_type="origin" not in request.headers)


def kobold_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router, running = APIRouter(), RunningReplies()

    async def opened(request: Request, *, stream: bool = False) -> tuple[KoboldCall, ActiveCall, ModelContext]:
        body = await _read(request, KoboldBody)
        model = await context.model(request, body.model)
        model.require_ready()
        frontend = model.frontend
        with param_names(SENT):
            memory = await _tokens(frontend, body.memory or "", "memory")
            prompt = await _tokens(frontend, body.prompt, "prompt", special=not memory)
            room, defaults = frontend.info.max_model_len, frontend.text.defaults
            call = await translated(request, kobold_call, body, prompt, memory, room, defaults)
            if stream:
                check_one_answer(call.request.sampling.n)
            return call, await open_call(request, model, [call.request]), model

    async def generate(request: Request) -> Response:
        call, active, model = await opened(request)
        reply, owner = KoboldReply(call, active, model.frontend), owner_of(request)
        running.add(owner, call.genkey, reply)
        try:
            async with active:
                told = await while_connected(reply.whole(), request.receive, context.lifecycle)
        finally:
            running.remove(owner, call.genkey, reply)
        return await json_answer(told)

    for path in ("/api/v1/generate", "/api/latest/generate"):
        router.post(path, summary="Continue a text, as KoboldAI", openapi_extra=takes(KoboldBody))(generate)

    @router.post("/api/extra/generate/stream", summary="The same in events", openapi_extra=takes(KoboldBody, EVENTS))
    async def generate_stream(request: Request) -> Response:
        call, active, model = await opened(request, stream=True)
        reply, owner = KoboldReply(call, active, model.frontend), owner_of(request)
        running.add(owner, call.genkey, reply)

        async def close() -> None:
            running.remove(owner, call.genkey, reply)
            await active.aclose()

        return EventStream(
            reply.events(),
            close,
            context.lifecycle,
            failed=lambda error: event(describe(error, request.scope)[1], "message"),
        )

    _add_running(router, context, running)
    _add_about(router, context)
    return router


async def _tokens(frontend: Frontend, text: str, field: str, *, special: bool = True) -> tuple[int, ...]:
    """A text in tokens."""
    if not text:
        return ()
    asked = GenerationRequest(uuid.uuid4().hex, SamplingParams(), prompt=text)
    with param_names({"prompt": field}):
        return await frontend.tokenize(asked if special else replace(asked, add_special_tokens=False))


def _add_running(router: APIRouter, context: ServerContext, running: RunningReplies) -> None:
    """What is asked of answers while they are written, by whichever of the server's processes."""
    orders = context.orders

    def so_far(owner: str, genkey: str) -> str:
        reply = running.find(owner, genkey)
        return reply.text if reply else ""

    def aborted(owner: str, genkey: str) -> bool:
        if (reply := running.find(owner, genkey)) is not None:
            reply.abort()
        return reply is not None

    orders.learn(_CHECK, so_far)
    orders.learn(_ABORT, aborted)

    async def checked(request: Request, genkey: str) -> Response:
        texts = await orders.give(_CHECK, owner_of(request), genkey)
        return json_response({"results": [{"text": next(filter(None, texts), "")}]})

    path = "/api/extra/generate/check"

    @router.post(path, summary="What an answer has so far", openapi_extra=takes(GenkeyBody))
    async def check(request: Request) -> Response:
        return await checked(request, (await _read(request, GenkeyBody)).genkey or "")

    @router.get(path, summary="What the answer without a name has so far", openapi_extra=gives("application/json"))
    async def check_unnamed(request: Request) -> Response:
        return await checked(request, "")

    @router.post("/api/extra/abort", summary="End an answer", openapi_extra=takes(GenkeyBody))
    async def abort(request: Request) -> Response:
        genkey = (await _read(request, GenkeyBody)).genkey or ""
        found = any(await orders.give(_ABORT, owner_of(request), genkey))
        return json_response({"success": "true" if found else "false", "done": "true"})


def _add_about(router: APIRouter, context: ServerContext) -> None:
    began, json = time.monotonic(), gives("application/json")

    @router.post("/api/extra/tokencount", summary="Count a text's tokens", openapi_extra=takes(TokenCountBody))
    async def token_count(request: Request) -> Response:
        body = await _read(request, TokenCountBody)
        model = await context.model(request, body.model)
        model.require_ready()
        ids = await _tokens(model.frontend, body.prompt, "prompt", special=body.special is not False)
        return await made_answer(lambda: {"value": len(ids), "ids": list(ids)})

    def told(path: str, summary: str, body: dict[str, Any]) -> None:
        @router.get(path, summary=summary, openapi_extra=json)
        async def fixed() -> Response:
            return json_response(body)

    told("/api/v1/info/version", "The version of KoboldAI's API", {"result": _API})
    told("/api/v1/config/max_length", "Tokens of an answer that does not say", {"value": DEFAULT_LENGTH})
    kinds = ("txt2img", "vision", "audio", "transcribe", "multiplayer", "websearch", "tts", "embeddings", "savedata")
    extra = {"result": "KoboldCpp", "version": _CPP, "protected": False, "llm": True, "jinja": True, "admin": 0}
    told("/api/extra/version", "The version of KoboldCpp's API", extra | dict.fromkeys(kinds, False))

    async def context_length(request: Request) -> Response:
        model = await context.model(request, None)
        model.require_ready()
        return json_response({"value": model.frontend.info.max_model_len})

    for path in ("/api/v1/config/max_context_length", "/api/extra/true_max_context_length"):
        router.get(path, summary="Tokens of the model's context", openapi_extra=json)(context_length)

    async def model_name(request: Request) -> Response:
        model = await context.model(request, None)
        return json_response({"result": f"koboldcpp/{model.model}"})

    for path in ("/api/v1/model", "/api/latest/model"):
        router.get(path, summary="The model's name", openapi_extra=json)(model_name)

    @router.get("/api/extra/perf", summary="What the server has done", openapi_extra=json)
    async def perf(request: Request) -> Response:
        model = await context.model(request, None)
        model.require_ready()
        stats = await model.frontend.client.stats()
        body = {"total_gens": stats.finished, "queue": stats.waiting, "idle": int(not (stats.running or stats.waiting))}
        return json_response({**body, "total_img_gens": 0, "uptime": time.monotonic() - began, "quiet": True})
