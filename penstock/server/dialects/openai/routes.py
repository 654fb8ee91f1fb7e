"""The OpenAI dialect's routes."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import ModelNotFoundError
from penstock.server.answer import Answer, EventStream, Service, while_connected
from penstock.server.body import read_json, validate
from penstock.server.dialects.openai.reply import Reply
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from penstock.server.dialects.openai.translate import Call, chat_call, completion_call, tokenize_request
from penstock.server.document import takes
from penstock.server.errors import bad_value, json_response, shown


def openai_router(service: Service) -> APIRouter:
    """The routes over one service."""
    router, frontend = APIRouter(), service.frontend
    created = int(time.time())

    def check_model(name: str | None) -> None:
        if name is not None and name != service.model:
            message = f"The model {shown(name)} is not served here; available: {shown(service.model)}."
            raise ModelNotFoundError(message, param="model", code="model_not_found")

    def model_object() -> dict[str, Any]:
        about = {"id": service.model, "object": "model", "created": created, "owned_by": "penstock"}
        return {**about, "root": service.model, "parent": None, "max_model_len": service.max_model_len()}

    async def run(request: Request, call: Call) -> Response:
        answer = await while_connected(Answer.open(service, call.requests), request.receive, service.lifecycle)
        reply = Reply(call, answer, frontend)
        if call.stream:
            return EventStream(reply.events(), answer.aclose, service.lifecycle)
        try:
            return json_response(await while_connected(reply.whole(), request.receive, service.lifecycle))
        finally:
            await answer.aclose()

    @router.post("/v1/chat/completions", summary="Answer a chat", openapi_extra=takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = validate(ChatBody, await read_json(request))
        check_model(body.model)
        call = chat_call(body, frontend.text.defaults)
        service.require_ready()
        return await run(request, call)

    @router.post("/v1/completions", summary="Continue texts", openapi_extra=takes(CompletionBody))
    async def completions(request: Request) -> Response:
        body = validate(CompletionBody, await read_json(request))
        check_model(body.model)
        call = completion_call(body, frontend.text.defaults)
        service.require_ready()
        return await run(request, call)

    @router.get("/v1/models", summary="List the models served")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_object()]})

    @router.get("/v1/models/{model:path}", summary="Describe a model")
    async def model(model: str) -> Response:
        check_model(model)
        return json_response(model_object())

    async def tokenize(request: Request) -> Response:
        body = validate(TokenizeBody, await read_json(request))
        check_model(body.model)
        service.require_ready()
        ids = await frontend.tokenize(tokenize_request(body))
        pieces = [frontend.piece(token) for token in ids] if body.return_token_strs else None
        counts = {"count": len(ids), "max_model_len": service.max_model_len()}
        return json_response({**counts, "tokens": list(ids), "token_strs": pieces})

    async def detokenize(request: Request) -> Response:
        body = validate(DetokenizeBody, await read_json(request))
        check_model(body.model)
        service.require_ready()
        vocab_size = frontend.info.vocab_size
        for index, token in enumerate(body.tokens):
            if token >= vocab_size:
                raise bad_value(f"tokens[{index}]", token, f"token ids below {vocab_size}")
        return json_response({"prompt": frontend.detokenize(body.tokens)})

    for prefix in ("", "/v1"):
        router.post(f"{prefix}/tokenize", summary="Text to token ids", openapi_extra=takes(TokenizeBody))(tokenize)
        router.post(f"{prefix}/detokenize", summary="Token ids to text", openapi_extra=takes(DetokenizeBody))(
            detokenize
        )
    return router
