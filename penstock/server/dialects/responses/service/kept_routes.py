"""The routes of a response that is there: told, deleted, cancelled."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.active_call import EventStream
from penstock.server.auth import owner_of
from penstock.server.body import read_query
from penstock.server.dialects.responses.schema import ItemsQuery, RetrieveQuery
from penstock.server.dialects.responses.service.background import Job
from penstock.server.dialects.responses.service.responses import Responses
from penstock.server.document import EVENTS, asks, gives
from penstock.server.encoding import json_answer, json_response
from penstock.server.errors import HttpError, bad_value
from penstock.server.pages import page_of
from penstock.server.paths import RESPONSE


def add_kept(router: APIRouter, responses: Responses) -> None:
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
