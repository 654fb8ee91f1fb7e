"""The routes of the Responses API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from penstock.config.errors import param_names
from penstock.server.active_call import EventStream, complete, open_call, typed_event
from penstock.server.body import read_body
from penstock.server.dialects.responses.composer import Composer
from penstock.server.dialects.responses.schema import ResponsesBody
from penstock.server.dialects.responses.service.compacting import add_compacting
from penstock.server.dialects.responses.service.kept_routes import add_kept
from penstock.server.dialects.responses.service.responses import Responses
from penstock.server.dialects.responses.socket.session import Session
from penstock.server.dialects.responses.socket.turn import only_prompt, turn_of, warmed
from penstock.server.dialects.responses.translate import sent_names
from penstock.server.document import EVENTS, takes
from penstock.server.encoding import json_answer
from penstock.server.middleware import ANSWER


def responses_router(responses: Responses) -> APIRouter:
    """The routes over one server's context."""
    router, context = APIRouter(), responses.context

    @router.post("/v1/responses", summary="Create a response", openapi_extra=takes(ResponsesBody, EVENTS))
    async def create(request: Request) -> Response:
        body = await read_body(request, ResponsesBody)
        model = await context.model(request, body.model, events=body.stream)
        with param_names(sent_names(body)):
            call = await responses.call(request, body, model)
            model.require_ready()
            if body.background:
                job = await responses.background(call, model)
                if body.stream:
                    return EventStream(job.follow(), None, context.lifecycle)
                return await json_answer(job.snapshot)
            turn = turn_of(request)
            warming = turn is not None and not turn.generate
            active = await open_call(request, model, [only_prompt(call.request) if warming else call.request])
        composer = Composer(call, model)
        happening = warmed(composer, active) if warming else responses.told(call, composer, active)
        if turn is not None:
            happening = turn.watched(call, composer, happening)
        if body.stream:
            events = (typed_event(told) async for told in happening)
            return EventStream(events, active.aclose, context.lifecycle, failed=composer.broken)

        async def whole() -> dict[str, Any]:
            async for _ in happening:
                pass
            return composer.response

        return await complete(whole(), active, request.receive, context.lifecycle)

    @router.websocket("/v1/responses")
    async def converse(socket: WebSocket) -> None:
        await Session(socket, socket.scope[ANSWER], responses.recent).run()

    add_kept(router, responses)
    add_compacting(router, responses)
    return router
