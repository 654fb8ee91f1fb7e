"""The Ollama dialect's routes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from penstock import __version__
from penstock.config.errors import RequestError, format_value, param_names
from penstock.core.pooling import PoolingParams
from penstock.engine.api import EngineState
from penstock.engine.pooling import Pooled, pool_all
from penstock.server.active_call import EventStream, complete, open_call_within_context
from penstock.server.body import read_body, translated
from penstock.server.context import ServerContext
from penstock.server.dialects.embeddings import ONE_TOKEN, answered
from penstock.server.dialects.ollama.about import described, kept, listed, served
from penstock.server.dialects.ollama.reply import OllamaReply, line, loaded
from penstock.server.dialects.ollama.schema import (
    EmbedBody,
    GenerateBody,
    OllamaChatBody,
    OllamaEmbeddingsBody,
    ShowBody,
)
from penstock.server.dialects.ollama.translate import SENT, OllamaCall, chat_call, generate_call
from penstock.server.document import gives, takes
from penstock.server.encoding import json_response, made_answer
from penstock.server.errors import HttpError, describe
from penstock.server.prompts import text_request
from penstock.server.shapes import RequestBody

OLLAMA_VERSION = "0.12.11"  # the version of Ollama whose API this is; clients ask for at least one
_LINES = "application/x-ndjson"
_LIBRARY = (
    *(("POST", f"/api/{name}", f"{name.capitalize()} a model") for name in ("pull", "push", "create", "copy")),
    ("DELETE", "/api/delete", "Delete a model"),
    *((method, "/api/blobs/{digest}", "A file of a model") for method in ("POST", "HEAD")),
)
_Body = TypeVar("_Body", bound=BaseModel)


async def _read(request: Request, model: type[_Body]) -> _Body:
    return await read_body(request, model, any_type="origin" not in request.headers)


def ollama_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()
    _add_answers(router, context)
    _add_embeddings(router, context)
    _add_models(router, context)
    return router


def _add_answers(router: APIRouter, context: ServerContext) -> None:
    frontend = context.frontend

    async def run(request: Request, call: OllamaCall) -> Response:
        context.require_ready()
        asked = call.request
        if asked is None:
            done = loaded(call)
            return Response(line(done), media_type=_LINES) if call.stream else json_response(done)
        if call.context:
            ids, tokenizer = await frontend.tokenize(asked), frontend.text.tokenizer
            begins = tokenizer.begins_chats and ids[0] == tokenizer.bos_id  # as the context does already
            asked = replace(asked, messages=None, prompt=None, prompt_ids=(*call.context, *ids[begins:]))
        active = await open_call_within_context(request, context, asked)
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
        context.check_model(served(context, body.model))
        with param_names(SENT):
            context.check_template(body.template or None)
            templated = frontend.text.template is not None
            call = await translated(request, generate_call, body, frontend.text.defaults, templated)
        with param_names({**SENT, "messages": "prompt", "prompt": "context" if call.context else "prompt"}):
            return await run(request, call)

    @router.post("/api/chat", summary="Answer a chat", openapi_extra=takes(OllamaChatBody, _LINES))
    async def chat(request: Request) -> Response:
        body = await _read(request, OllamaChatBody)
        context.check_model(served(context, body.model))
        with param_names(SENT):
            return await run(request, await translated(request, chat_call, body, frontend.text.defaults))


def _add_embeddings(router: APIRouter, context: ServerContext) -> None:
    pooling = context.frontend.text.pooling

    async def embedded(request: Request, texts: list[str], params: PoolingParams, field: str) -> list[Pooled]:
        context.require_ready()
        sent = [text_request(request, RequestBody(), text, ONE_TOKEN) for text in pooling.prompted(texts)]
        return await answered(context, request, pool_all(context.frontend, sent, [params] * len(sent), field))

    @router.post("/api/embed", summary="Embed texts", openapi_extra=takes(EmbedBody))
    async def embed(request: Request) -> Response:
        started = time.monotonic()
        body = await _read(request, EmbedBody)
        context.check_model(served(context, body.model))
        texts = [body.input] if isinstance(body.input, str) else body.input
        found = await embedded(request, texts, pooling.embedding(body.dimensions, normalize=True), "input")
        counts = {"prompt_eval_count": sum(result.prompt_tokens for result in found), "load_duration": 0}
        total = int((time.monotonic() - started) * 1e9)

        def made() -> dict[str, Any]:
            vectors = [result.values.tolist() for result in found]
            return {"model": body.model, "embeddings": vectors, "total_duration": total, **counts}

        return await made_answer(made)

    @router.post("/api/embeddings", summary="Embed a text", openapi_extra=takes(OllamaEmbeddingsBody))
    async def embeddings(request: Request) -> Response:
        body = await _read(request, OllamaEmbeddingsBody)
        context.check_model(served(context, body.model))
        found = await embedded(request, [body.prompt], pooling.embedding(), "prompt")
        return json_response({"embedding": found[0].values.tolist()})


def _add_models(router: APIRouter, context: ServerContext) -> None:
    def models(entries: list[dict[str, Any]]) -> Response:
        return json_response({"models": entries})

    async def root() -> Response:
        return PlainTextResponse("Ollama is running")  # clients ask for this text to see that the API is there

    async def tags() -> Response:
        context.require_ready()
        return models([listed(context)])

    async def version() -> Response:
        return json_response({"version": OLLAMA_VERSION, "penstock": __version__})

    for path, handler, summary in (
        ("/", root, "Whether the server runs"),
        ("/api/tags", tags, "List the models served"),
        ("/api/version", version, "The version of Ollama's API"),
    ):
        media_type = "text/plain" if path == "/" else "application/json"
        router.get(path, summary=summary, openapi_extra=gives(media_type))(handler)
        router.head(path, summary=summary)(handler)

    @router.get("/api/ps", summary="List the models loaded", openapi_extra=gives("application/json"))
    async def ps() -> Response:
        return models([kept(context)] if context.frontend.client.state is EngineState.READY else [])

    @router.post("/api/show", summary="Describe a model", openapi_extra=takes(ShowBody))
    async def show(request: Request) -> Response:
        body = await _read(request, ShowBody)
        names = [name for name in (body.model, body.name) if name]  # one of which clients may leave empty
        if not names:
            raise RequestError("model is required.", param="model", code="missing_required_parameter")
        for name in names:
            context.check_model(served(context, name))
        context.require_ready()
        return json_response(described(context))

    async def library(request: Request) -> Response:
        path, why = format_value(request.url.path), "this server keeps the one model it was started with"
        raise HttpError(501, f"{path} is not available yet: {why}.", code="not_implemented")

    async def blob(request: Request, digest: str) -> Response:
        return await library(request)

    for method, path, summary in _LIBRARY:
        refuse = blob if "{digest}" in path else library
        router.add_api_route(path, refuse, methods=[method], summary=f"{summary} (not yet)", status_code=501)
