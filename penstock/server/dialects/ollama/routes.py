"""The Ollama dialect's routes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from penstock.config.errors import param_names
from penstock.config.pooling import PoolingParams
from penstock.engine.pooling import Pooled, pool_all
from penstock.server.active_call import EventStream, complete, open_call_within_context
from penstock.server.auth import AdminKeys
from penstock.server.body import read_body, translated
from penstock.server.connected import while_connected
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.embeddings import ONE_TOKEN, answered
from penstock.server.dialects.ollama.keep_alive import keep_alive_of
from penstock.server.dialects.ollama.models.about import served
from penstock.server.dialects.ollama.models.routes import add_models
from penstock.server.dialects.ollama.reply import OllamaReply, line, loaded
from penstock.server.dialects.ollama.schema import (
    EmbedBody,
    GenerateBody,
    NamedBody,
    OllamaChatBody,
    OllamaEmbeddingsBody,
)
from penstock.server.dialects.ollama.translate import SENT, OllamaCall, chat_call, generate_call
from penstock.server.document import takes
from penstock.server.encoding import json_response, made_answer
from penstock.server.errors import describe
from penstock.server.infilling import infilled
from penstock.server.prompts import text_request
from penstock.server.shapes import RequestBody

_LINES = "application/x-ndjson"
_Body = TypeVar("_Body", bound=BaseModel)


async def _read(request: Request, model: type[_Body]) -> _Body:
    return await read_body(request, model, any_type="origin" not in request.headers)


async def named(context: ServerContext, request: Request, body: NamedBody) -> ModelContext:
    """The model of a body, which stays as long as that says."""
    return await context.model(request, served(context, body.model), keep_alive_of(body.keep_alive))


def ollama_router(context: ServerContext, keys: AdminKeys, *, page: bool) -> APIRouter:
    """The routes over one server's context; `keys` are of those who may unload what others need, `page` as there is."""
    router = APIRouter()
    _add_answers(router, context, keys)
    _add_embeddings(router, context)
    add_models(router, context, page=page)
    return router


async def put_away(context: ServerContext, request: Request, body: NamedBody, keys: AdminKeys) -> bool:
    """Unloads the model of a body that asks for nothing else; whether it does.

    Raises:
        HttpError: 403, the model is pinned or in use, and the client is no administrator.
    """
    host, stays = context.models.host, keep_alive_of(body.keep_alive)
    if host is None or stays is None or stays.seconds != 0:
        return False
    source = await host.find(served(context, body.model))
    if not host.entry(source).unwanted:
        keys.check_admin(request.headers)
    await while_connected(host.unload(source), request.receive, context.lifecycle)
    return True


def _told(done: dict[str, Any], *, stream: bool) -> Response:
    return Response(line(done), media_type=_LINES) if stream else json_response(done)


def _add_answers(router: APIRouter, context: ServerContext, keys: AdminKeys) -> None:
    async def run(request: Request, model: ModelContext, call: OllamaCall) -> Response:
        model.require_ready()
        asked, frontend = call.request, model.frontend
        if asked is None:
            return _told(loaded(call.model, chat=call.chat), stream=call.stream)
        if call.context:
            ids, tokenizer = await frontend.tokenize(asked), frontend.text.tokenizer
            begins = tokenizer.begins_chats and ids[0] == tokenizer.bos_id  # as the context does already
            asked = replace(asked, messages=None, prompt=None, prompt_ids=(*call.context, *ids[begins:]))
        active = await open_call_within_context(request, model, asked)
        reply = OllamaReply(call, active, frontend)
        if call.stream:
            return EventStream(
                reply.lines(),
                active.aclose,
                context.lifecycle,
                failed=lambda error: line(describe(error, request.scope)[1]),
                keepalive=b"",  # nothing is sent: clients take each line for a part of the answer
                media_type=_LINES,
            )
        return await complete(reply.whole(), active, request.receive, context.lifecycle)

    @router.post("/api/generate", summary="Continue a prompt", openapi_extra=takes(GenerateBody, _LINES))
    async def generate(request: Request) -> Response:
        body = await _read(request, GenerateBody)
        if not body.prompt and await put_away(context, request, body, keys):
            return _told(loaded(body.model, chat=False, unloaded=True), stream=body.stream is not False)
        model = await named(context, request, body)
        text = model.frontend.text
        with param_names(SENT):
            model.check_template(body.template or None)
            call = await translated(request, generate_call, body, text.defaults, text.template is not None)
            if body.suffix and call.request is not None:
                (between,) = await translated(request, infilled, (call.request,), body.suffix, model.frontend)
                call = replace(call, request=between)
        with param_names({**SENT, "messages": "prompt", "prompt": "context" if call.context else "prompt"}):
            return await run(request, model, call)

    @router.post("/api/chat", summary="Answer a chat", openapi_extra=takes(OllamaChatBody, _LINES))
    async def chat(request: Request) -> Response:
        body = await _read(request, OllamaChatBody)
        if not body.messages and await put_away(context, request, body, keys):
            return _told(loaded(body.model, chat=True, unloaded=True), stream=body.stream is not False)
        model = await named(context, request, body)
        with param_names(SENT):
            call = await translated(request, chat_call, body, model.frontend.text.defaults)
            return await run(request, model, call)


def _add_embeddings(router: APIRouter, context: ServerContext) -> None:
    async def embedded(
        request: Request, model: ModelContext, texts: list[str], params: PoolingParams, field: str
    ) -> list[Pooled]:
        model.require_ready()
        prompted = model.frontend.text.pooling.prompted(texts)
        sent = [text_request(request, RequestBody(), text, ONE_TOKEN) for text in prompted]
        return await answered(model, request, pool_all(model.frontend, sent, [params] * len(sent), field))

    @router.post("/api/embed", summary="Embed texts", openapi_extra=takes(EmbedBody))
    async def embed(request: Request) -> Response:
        started = time.monotonic()
        body = await _read(request, EmbedBody)
        model = await named(context, request, body)
        texts = [body.input] if isinstance(body.input, str) else body.input
        params = model.frontend.text.pooling.embedding(body.dimensions, normalize=True)
        found = await embedded(request, model, texts, params, "input")
        counts = {"prompt_eval_count": sum(result.prompt_tokens for result in found), "load_duration": 0}
        total = int((time.monotonic() - started) * 1e9)

        def made() -> dict[str, Any]:
            vectors = [result.values.tolist() for result in found]
            return {"model": body.model, "embeddings": vectors, "total_duration": total, **counts}

        return await made_answer(made)

    @router.post("/api/embeddings", summary="Embed a text", openapi_extra=takes(OllamaEmbeddingsBody))
    async def embeddings(request: Request) -> Response:
        body = await _read(request, OllamaEmbeddingsBody)
        model = await named(context, request, body)
        found = await embedded(request, model, [body.prompt], model.frontend.text.pooling.embedding(), "prompt")
        return json_response({"embedding": found[0].values.tolist()})
