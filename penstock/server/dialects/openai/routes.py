"""The OpenAI dialect's routes."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import param_names
from penstock.server.active_call import EventStream, complete, open_call, ping_s
from penstock.server.auth import owner_of
from penstock.server.body import read_body, translated
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.chat_control import RunningChats
from penstock.server.dialects.openai.reply import OpenAIReply
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody
from penstock.server.dialects.openai.translate import OpenAICall, chat_call, completion_call, sent_names
from penstock.server.dialects.stored_chats import Keep, StoredChats
from penstock.server.document import EVENTS, takes
from penstock.server.errors import REQUEST_ID
from penstock.server.handed_on import handed_on
from penstock.server.infilling import infilled
from penstock.server.webui_fields import names_of_theirs, within_context


def named(call: OpenAICall, request: Request) -> OpenAICall:
    """The call under the id its client gave in X-Request-Id, which counts for more than the body's, as with vLLM."""
    given = str(request.scope[REQUEST_ID])
    if request.headers.get("x-request-id") != given:
        return call
    return replace(call, id=f"{call.id.partition('-')[0]}-{given}")


def openai_router(context: ServerContext, chats: StoredChats, running: RunningChats) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    async def run(request: Request, model: ModelContext, call: OpenAICall, keep: Keep | None = None) -> Response:
        with param_names({"grammar": call.form}):
            active = await open_call(request, model, call.requests, call.beams, call.best_of)
        call = context.habits.of(named(call, request))
        if call.reasoning_control:
            running.add(owner_of(request), call.id, active, model.frontend)
        reply = OpenAIReply(call, active, model.frontend, keep)
        if call.stream:
            return EventStream(reply.events(), active.aclose, context.lifecycle, keepalive_s=ping_s(call.ping))
        return await complete(reply.whole(), active, request.receive, context.lifecycle)

    async def chat_completions(request: Request) -> Response:
        if (answer := await handed_on(request, context, "/chat/completions")) is not None:
            return answer
        body = await read_body(request, ChatBody)
        model = await context.model(request, body.model, events=body.stream, lora=body.lora, adapter=body.lora_path)
        with param_names({**sent_names(body), **names_of_theirs(body)}):
            model.check_template(body.chat_template)
            call = await translated(request, chat_call, body, model.frontend.text.defaults)
            call = replace(call, requests=within_context(call.requests, body, model.max_model_len()))
            keep = chats.keeper(owner_of(request), body)
            model.require_ready()
            return await run(request, model, call, keep)

    for path in ("/v1/chat/completions", "/chat/completions"):
        router.post(path, summary="Answer a chat", openapi_extra=takes(ChatBody, EVENTS))(chat_completions)

    @router.post("/v1/completions", summary="Continue texts", openapi_extra=takes(CompletionBody, EVENTS))
    async def completions(request: Request) -> Response:
        if (answer := await handed_on(request, context, "/completions")) is not None:
            return answer
        body = await read_body(request, CompletionBody)
        model = await context.model(request, body.model, events=body.stream, lora=body.lora, adapter=body.lora_path)
        with param_names({**sent_names(body), **names_of_theirs(body)}):
            call = await translated(request, completion_call, body, model.frontend.text.defaults)
            model.require_ready()
            asked = within_context(call.requests, body, model.max_model_len())
            requests = await translated(request, infilled, asked, body.suffix, model.frontend)
            return await run(request, model, replace(call, requests=requests))

    return router
