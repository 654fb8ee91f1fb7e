"""The llama-server dialect's routes for answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import param_names
from penstock.config.generation import GenerationRequest
from penstock.engine.frontend import Frontend
from penstock.server.active_call import EventStream, complete, event, open_call, ping_s
from penstock.server.body import read_body, translated
from penstock.server.context import ServerContext
from penstock.server.dialects.llama_server.about import add_about
from penstock.server.dialects.llama_server.reply import LlamaReply
from penstock.server.dialects.llama_server.schema import InfillBody, LlamaCompletionBody, LlamaSampling
from penstock.server.dialects.llama_server.translate import SENT, call_of, infill_prompt
from penstock.server.document import EVENTS, takes
from penstock.server.errors import describe
from penstock.server.mixed_prompts import mixed_prompts

_Body = TypeVar("_Body", bound=LlamaSampling)


def llama_server_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    async def run(
        request: Request,
        kind: type[_Body],
        make: Callable[[_Body, Frontend], list[GenerationRequest]],
    ) -> Response:
        body = await read_body(request, kind, any_type="origin" not in request.headers)
        model = await context.model(request, body.model, events=body.stream, lora=body.lora)
        model.require_ready()
        frontend = model.frontend
        prompts = []
        for each in await translated(request, make, body, frontend):
            prompts.append((each, await frontend.tokenize(each)))
            await asyncio.sleep(0)  # of many prompts, so that others get their turn between
        with param_names(SENT):
            call = await translated(request, call_of, body, prompts, frontend)
            active = await open_call(request, model, call.requests)
        reply = LlamaReply(call, active, frontend)
        if not body.stream:
            return await complete(reply.whole(), active, request.receive, context.lifecycle)
        return EventStream(
            reply.events(),
            active.aclose,
            context.lifecycle,
            failed=lambda error: event(describe(error, request.scope)[1]),
            keepalive_s=ping_s(body.sse_ping_interval),
        )

    async def completion(request: Request) -> Response:
        return await run(
            request, LlamaCompletionBody, lambda body, frontend: mixed_prompts(body.prompt, "prompt", frontend)
        )

    for path in ("/completion", "/completions"):
        router.post(path, summary="Continue prompts", openapi_extra=takes(LlamaCompletionBody, EVENTS))(completion)

    @router.post("/infill", summary="Fill in the middle", openapi_extra=takes(InfillBody, EVENTS))
    async def infill(request: Request) -> Response:
        return await run(request, InfillBody, lambda body, frontend: [infill_prompt(body, frontend)])

    add_about(router, context)
    return router
