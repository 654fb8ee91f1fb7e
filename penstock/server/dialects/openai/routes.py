"""The OpenAI dialect's routes."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import spelled
from penstock.server.answer import Answer, EventStream, Service, while_connected
from penstock.server.body import read_json, validate
from penstock.server.dialects.openai.reply import Reply
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody
from penstock.server.dialects.openai.translate import Call, chat_call, completion_call, sent_names
from penstock.server.document import gives, takes
from penstock.server.errors import json_response

_EVENTS = "text/event-stream"


def openai_router(service: Service) -> APIRouter:
    """The routes over one service."""
    router, frontend = APIRouter(), service.frontend
    created = int(time.time())

    def model_object() -> dict[str, Any]:
        about = {"id": service.model, "object": "model", "created": created, "owned_by": "penstock"}
        return {**about, "root": service.model, "parent": None, "max_model_len": service.max_model_len()}

    async def run(request: Request, call: Call) -> Response:
        answer = await while_connected(
            Answer.open(service, call.requests, call.search), request.receive, service.lifecycle
        )
        reply = Reply(call, answer, frontend)
        if call.stream:
            return EventStream(reply.events(), answer.aclose, service.lifecycle)
        try:
            return json_response(await while_connected(reply.whole(), request.receive, service.lifecycle))
        finally:
            await answer.aclose()

    @router.post("/v1/chat/completions", summary="Answer a chat", openapi_extra=takes(ChatBody, _EVENTS))
    async def chat_completions(request: Request) -> Response:
        body = validate(ChatBody, await read_json(request))
        service.check_model(body.model)
        service.check_template(body.chat_template)
        with spelled(sent_names(body)):
            call = chat_call(body, frontend.text.defaults)
            service.require_ready()
            return await run(request, call)

    @router.post("/v1/completions", summary="Continue texts", openapi_extra=takes(CompletionBody, _EVENTS))
    async def completions(request: Request) -> Response:
        body = validate(CompletionBody, await read_json(request))
        service.check_model(body.model)
        with spelled(sent_names(body)):
            call = completion_call(body, frontend.text.defaults)
            service.require_ready()
            return await run(request, call)

    @router.get("/v1/models", summary="List the models served", openapi_extra=gives("application/json"))
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_object()]})

    @router.get("/v1/models/{model:path}", summary="Describe a model", openapi_extra=gives("application/json"))
    async def model(model: str) -> Response:
        service.check_model(model)
        return json_response(model_object())

    return router
