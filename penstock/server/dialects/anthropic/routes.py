"""The Anthropic dialect's routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import param_names
from penstock.config.sampling import SamplingParams
from penstock.server.active_call import EventStream, complete, event, open_call_within_context
from penstock.server.body import read_body, translated
from penstock.server.context import ServerContext
from penstock.server.conversation import function_fields
from penstock.server.dialects.anthropic.reply import PING, AnthropicReply
from penstock.server.dialects.anthropic.schema import CountTokensBody, MessagesBody
from penstock.server.dialects.anthropic.translate import messages_call, prompt_request
from penstock.server.document import EVENTS, takes
from penstock.server.encoding import json_response
from penstock.server.errors import describe

_Body = TypeVar("_Body", bound=CountTokensBody)
_SENT = {"stop": "stop_sequences", "grammar": "output_config.format.schema", "thinking_budget": "thinking"}


def sent_names(body: CountTokensBody) -> Mapping[str, str]:
    """What our fields are called in a body, for messages."""
    return _SENT | function_fields(body.tools, "tools[{}].input_schema")


async def read_messages(request: Request, model: type[_Body]) -> _Body:
    """The body. Fields unknown here belong to a beta if the request names any, and are passed over."""
    return await read_body(request, model, passing="anthropic-beta" in request.headers)


def anthropic_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    @router.post("/v1/messages", summary="Answer a chat", openapi_extra=takes(MessagesBody, EVENTS))
    async def messages(request: Request) -> Response:
        body = await read_messages(request, MessagesBody)
        model = await context.model(request, body.model, events=body.stream)
        with param_names(sent_names(body)):
            call = await translated(request, messages_call, body, model.frontend.text.defaults)
            model.require_ready()
            active = await open_call_within_context(request, model, call.request)
        reply = AnthropicReply(call, active)
        if call.stream:
            return EventStream(
                reply.events(),
                active.aclose,
                context.lifecycle,
                failed=lambda error: event(describe(error, request.scope)[1], "error"),
                keepalive=PING,
            )
        return await complete(reply.whole(), active, request.receive, context.lifecycle)

    @router.post("/v1/messages/count_tokens", summary="Count a chat's tokens", openapi_extra=takes(CountTokensBody))
    async def count_tokens(request: Request) -> Response:
        body = await read_messages(request, CountTokensBody)
        model = await context.model(request, body.model)
        with param_names(sent_names(body)):
            asked = await translated(request, prompt_request, body, SamplingParams(max_tokens=1))
            model.require_ready()
            return json_response({"input_tokens": len(await model.frontend.tokenize(asked))})

    return router
