"""text-generation-webui's own routes, below /v1/internal: tokens, next tokens, prompts of chats, models."""

from __future__ import annotations

import asyncio
import math
import uuid
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.config import limits
from penstock.config.errors import RequestError, param_names
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs
from penstock.engine.frontend import Frontend
from penstock.server.active_call import ActiveCall, complete, open_call
from penstock.server.body import read_body, translated
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.openai.schema import ChatBody
from penstock.server.dialects.openai.translate import chat_call, sent_names
from penstock.server.document import gives, takes
from penstock.server.encoding import json_answer, json_response, made_answer
from penstock.server.shapes import Exact, Loose, TokenIds


class WebuiTextBody(Exact):
    """A text to encode or count."""

    text: str


class WebuiTokensBody(Exact):
    """Token ids to decode."""

    tokens: TokenIds


class WebuiLogitsBody(Loose):
    """A text whose next token is asked for. Samplers are passed over: probabilities are the model's own."""

    prompt: Annotated[str, Field(min_length=1)]
    top_logits: Annotated[int, Field(ge=1)] | None = None


WEBUI_BODIES = (WebuiTextBody, WebuiTokensBody, WebuiLogitsBody)
_JSON = gives("application/json")


async def _ids(model: ModelContext, text: str) -> tuple[int, ...]:
    if not text:
        return ()
    asked = GenerationRequest(uuid.uuid4().hex, SamplingParams(), prompt=text)
    with param_names({"prompt": "text"}):
        return await model.frontend.tokenize(asked)


def webui_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter(prefix="/v1/internal")

    async def ready(request: Request) -> ModelContext:
        model = await context.model(request, _used_last(context))
        model.require_ready()
        return model

    @router.get("/health", summary="Whether the server answers", openapi_extra=_JSON)
    async def health() -> Response:
        return json_response({"status": "ok"})

    @router.post("/encode", summary="A text in tokens", openapi_extra=takes(WebuiTextBody))
    async def encode(request: Request) -> Response:
        body = await read_body(request, WebuiTextBody)
        ids = await _ids(await ready(request), body.text)
        return await json_answer({"tokens": list(ids), "length": len(ids)})

    @router.post("/token-count", summary="How many tokens a text has", openapi_extra=takes(WebuiTextBody))
    async def token_count(request: Request) -> Response:
        body = await read_body(request, WebuiTextBody)
        return json_response({"length": len(await _ids(await ready(request), body.text))})

    @router.post("/decode", summary="The text of tokens", openapi_extra=takes(WebuiTokensBody))
    async def decode(request: Request) -> Response:
        body = await read_body(request, WebuiTokensBody)
        frontend = (await ready(request)).frontend
        return await made_answer(lambda: {"text": frontend.detokenize(body.tokens)})

    @router.post("/logits", summary="The likeliest next tokens", openapi_extra=takes(WebuiLogitsBody))
    async def logits(request: Request) -> Response:
        body = await read_body(request, WebuiLogitsBody)
        model = await ready(request)
        most = min(body.top_logits or limits.MAX_TOP_LOGPROBS, limits.MAX_TOP_LOGPROBS)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=most)
        active = await open_call(request, model, [GenerationRequest(uuid.uuid4().hex, sampling, prompt=body.prompt)])
        return await complete(_next_tokens(active, model.frontend, most), active, request.receive, context.lifecycle)

    @router.post("/chat-prompt", summary="The prompt of a chat", openapi_extra=takes(ChatBody))
    async def chat_prompt(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        model = await ready(request)
        model.check_template(body.chat_template)
        with param_names(sent_names(body)):
            call = await translated(request, chat_call, body, model.frontend.text.defaults)
            return await json_answer({"prompt": await asyncio.to_thread(model.frontend.render, call.requests[0])})

    _add_models(router, context)
    return router


def _used_last(context: ServerContext) -> str | None:
    """The model that was used last, of a server of several: these routes name none. None where there is one.

    Raises:
        RequestError: none is loaded.
    """
    if context.models.host is None:
        return None
    there = [entry for entry in context.models.host.entries() if entry.usable]
    if not there:
        raise RequestError("No model is loaded; POST /v1/internal/model/load does that.", code="no_model_loaded")
    return max(there, key=lambda entry: entry.used_at).name


async def _next_tokens(active: ActiveCall, frontend: Frontend, most: int) -> dict[str, dict[str, float]]:
    """Probabilities of the likeliest next tokens by their texts, as many as the server tells at most.

    Tokens of one text, such as parts of characters, count together.
    """
    entries: list[TokenLogprobs] = []
    async for _, delta in active.deltas():
        entries += delta.logprobs
    found: dict[str, float] = {}
    for token, logprob in (pair for entry in entries for pair in entry.top[:most]):
        piece = frontend.piece(token)
        found[piece] = found.get(piece, 0.0) + math.exp(logprob)
    return {"logits": found}


def _adapters(context: ServerContext) -> list[str]:
    return [one.name for one in context.models.adapters.all()]


def _add_models(router: APIRouter, context: ServerContext) -> None:
    host = context.models.host

    @router.get("/model/info", summary="The model that answers", openapi_extra=_JSON)
    async def info() -> Response:
        there = context.models.names() if host is None else [entry.name for entry in host.entries() if entry.usable]
        name = there[0] if there else "None"
        return json_response({"model_name": name, "lora_names": _adapters(context), "loader": "penstock"})

    @router.get("/model/list", summary="All models", openapi_extra=_JSON)
    async def models() -> Response:
        return json_response({"model_names": list(context.models.names())})

    @router.get("/lora/list", summary="Adapters that a model's name may be", openapi_extra=_JSON)
    async def adapters() -> Response:
        return json_response({"lora_names": _adapters(context)})
