"""The routes of the Responses API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import param_names
from penstock.server.active_call import EventStream, complete, open_call, typed_event
from penstock.server.auth import owner_of
from penstock.server.body import read_body, read_query
from penstock.server.dialects.responses.composer import Composer
from penstock.server.dialects.responses.schema import ItemsQuery, ResponsesBody, RetrieveQuery
from penstock.server.dialects.responses.service.background import Job
from penstock.server.dialects.responses.service.compacting import add_compacting
from penstock.server.dialects.responses.service.responses import Responses
from penstock.server.dialects.responses.translate import sent_names
from penstock.server.document import EVENTS, asks, gives, takes
from penstock.server.encoding import json_answer, json_response
from penstock.server.errors import HttpError, bad_value
from penstock.server.pages import page_of
from penstock.server.paths import RESPONSE


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
            active = await open_call(request, model, [call.request])
        composer = Composer(call, model)
        happening = responses.told(call, composer, active)
        if body.stream:
            events = (typed_event(told) async for told in happening)
            return EventStream(events, active.aclose, context.lifecycle, failed=composer.broken)

        async def whole() -> dict[str, Any]:
            async for _ in happening:
                pass
            return composer.response

        return await complete(whole(), active, request.receive, context.lifecycle)

    _kept_routes(router, responses)
    add_compacting(router, responses)
    return router


def _kept_routes(router: APIRouter, responses: Responses) -> None:
    """The routes of a response that is there."""

    @router.get(RESPONSE, summary="A response, or its events", openapi_extra=asks(RetrieveQuery, EVENTS))
    async def retrieve(response_id: str, request: Request) -> Response:
        query, owner = read_query(RetrieveQuery, request), owner_of(request)
        start = 0 if query.starting_after is None else query.starting_after + 1
        job = responses.jobs.get(owner, response_id)
        if job is None:
            record = await responses.store.found(owner, response_id)
            job = Job(owner, record.object, list(record.events))
        if not query.stream:
            return await json_answer(job.snapshot)
        if not job.events:
            raise bad_value("stream", True, "false for a response that did not run in the background")
        return EventStream(job.follow(start), None, responses.context.lifecycle)

    @router.delete(RESPONSE, summary="Delete a response", openapi_extra=gives("application/json"))
    async def delete(response_id: str, request: Request) -> Response:
        owner = owner_of(request)
        await responses.stopped(owner, response_id)
        await responses.store.delete(owner, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.post(f"{RESPONSE}/cancel", summary="Cancel a background response", openapi_extra=gives("application/json"))
    async def cancel(response_id: str, request: Request) -> Response:
        record = await responses.stopped(owner_of(request), response_id)
        if not record.object["background"]:
            raise HttpError(400, "Only responses with background: true can be cancelled.", code="not_background")
        return await json_answer(record.object)

    @router.get(f"{RESPONSE}/input_items", summary="What the model was shown", openapi_extra=asks(ItemsQuery))
    async def input_items(response_id: str, request: Request) -> Response:
        record = await responses.store.found(owner_of(request), response_id)
        return await json_answer(page_of(record.items, read_query(ItemsQuery, request)))
