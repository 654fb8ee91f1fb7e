"""The OpenAI dialect's routes."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import param_names
from penstock.server.answer import EventStream, Service, complete, opened
from penstock.server.body import read_body, translated
from penstock.server.dialects.openai.reply import Reply
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody
from penstock.server.dialects.openai.translate import Call, chat_call, completion_call, sent_names
from penstock.server.document import EVENTS, takes
from penstock.server.errors import REQUEST_ID


def named(call: Call, request: Request) -> Call:
    """The call under the id its client gave in X-Request-Id, which counts for more than the body's, as with vLLM."""
    given = str(request.scope[REQUEST_ID])
    if request.headers.get("x-request-id") != given:
        return call
    return replace(call, id=f"{call.id.partition('-')[0]}-{given}")


def openai_router(service: Service) -> APIRouter:
    """The routes over one service."""
    router, frontend = APIRouter(), service.frontend

    async def run(request: Request, call: Call) -> Response:
        with param_names({"grammar": call.form}):
            answer = await opened(request, service, call.requests, call.search)
        reply = Reply(named(call, request), answer, frontend)
        if call.stream:
            return EventStream(reply.events(), answer.aclose, service.lifecycle)
        return await complete(reply.whole(), answer, request.receive, service.lifecycle)

    @router.post("/v1/chat/completions", summary="Answer a chat", openapi_extra=takes(ChatBody, EVENTS))
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        service.check_model(body.model)
        service.check_template(body.chat_template)
        with param_names(sent_names(body)):
            call = await translated(request, chat_call, body, frontend.text.defaults)
            service.require_ready()
            return await run(request, call)

    @router.post("/v1/completions", summary="Continue texts", openapi_extra=takes(CompletionBody, EVENTS))
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        service.check_model(body.model)
        with param_names(sent_names(body)):
            call = await translated(request, completion_call, body, frontend.text.defaults)
            service.require_ready()
            return await run(request, call)

    return router
