"""The routes of the Responses API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import spelled
from penstock.core.sampling import SamplingParams
from penstock.server.answer import Answer, EventStream, while_connected
from penstock.server.auth import ApiKeys
from penstock.server.background import Job
from penstock.server.body import read_json, read_query, validate
from penstock.server.dialects.responses.composer import Composer
from penstock.server.dialects.responses.running import Responses, encoded
from penstock.server.dialects.responses.schema import InputTokensBody, ItemsQuery, ResponsesBody, RetrieveQuery
from penstock.server.dialects.responses.translate import prompt_request, sent_names
from penstock.server.document import asks, gives, takes
from penstock.server.errors import HttpError, bad_value, json_response

_EVENTS = "text/event-stream"


async def _nothing() -> None:
    pass


def responses_router(responses: Responses, keys: ApiKeys) -> APIRouter:
    """The routes over one service."""
    router, service = APIRouter(), responses.service

    @router.post("/v1/responses", summary="Create a response", openapi_extra=takes(ResponsesBody, _EVENTS))
    async def create(request: Request) -> Response:
        body = validate(ResponsesBody, await read_json(request))
        service.check_model(body.model)
        with spelled(sent_names(body)):
            call = await responses.call(body, keys.owner(request.headers))
            service.require_ready()
            if body.background:
                job = await responses.background(call)
                if body.stream:
                    return EventStream(job.follow(), _nothing, service.lifecycle)
                return json_response(job.snapshot)
            opening = Answer.open(service, [call.request])
            answer = await while_connected(opening, request.receive, service.lifecycle)
        composer = Composer(call, service.frontend)
        if body.stream:

            async def events() -> AsyncIterator[bytes]:
                yield encoded(composer.status("created"))
                async for told in responses.events(call, composer, answer):
                    yield encoded(told)
                yield encoded(await responses.ended(call, composer))

            return EventStream(events(), answer.aclose, service.lifecycle, failed=composer.broken)

        async def whole() -> None:
            async for _ in responses.events(call, composer, answer):
                pass
            await responses.ended(call, composer)

        try:
            await while_connected(whole(), request.receive, service.lifecycle)
        finally:
            await answer.aclose()
        return json_response(composer.response)

    @router.post("/v1/responses/input_tokens", summary="Count a prompt's tokens", openapi_extra=takes(InputTokensBody))
    async def input_tokens(request: Request) -> Response:
        body = validate(InputTokensBody, await read_json(request))
        service.check_model(body.model)
        service.require_ready()
        name = uuid.uuid4().hex
        with spelled(sent_names(body)):
            items = await responses.conversation(body, keys.owner(request.headers), name)
            ids = await service.frontend.tokenize(prompt_request(body, items, name, SamplingParams()))
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    _kept_routes(router, responses, keys)
    return router


def _kept_routes(router: APIRouter, responses: Responses, keys: ApiKeys) -> None:
    """The routes of a response that is there."""
    path = "/v1/responses/{response_id}"

    @router.get(path, summary="A response, or its events", openapi_extra=asks(RetrieveQuery, _EVENTS))
    async def retrieve(response_id: str, request: Request) -> Response:
        query, owner = read_query(RetrieveQuery, request), keys.owner(request.headers)
        start = 0 if query.starting_after is None else query.starting_after + 1
        if (job := responses.jobs.get(owner, response_id)) is not None:
            if query.stream:
                return EventStream(job.follow(start), _nothing, responses.service.lifecycle)
            return json_response(job.snapshot)
        record = await responses.record(owner, response_id)
        if not query.stream:
            return json_response(record.response)
        if not record.events:
            raise bad_value("stream", True, "false for a response that did not run in the background")
        finished = Job(owner, record.response, list(record.events))
        return EventStream(finished.follow(start), _nothing, responses.service.lifecycle)

    @router.delete(path, summary="Delete a response", openapi_extra=gives("application/json"))
    async def delete(response_id: str, request: Request) -> Response:
        owner = keys.owner(request.headers)
        if (job := responses.jobs.get(owner, response_id)) is not None:
            await job.cancel()
        await responses.record(owner, response_id)
        await responses.store.delete(owner, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.post(f"{path}/cancel", summary="Cancel a background response", openapi_extra=gives("application/json"))
    async def cancel(response_id: str, request: Request) -> Response:
        owner = keys.owner(request.headers)
        if (job := responses.jobs.get(owner, response_id)) is not None:
            await job.cancel()
        record = await responses.record(owner, response_id)
        if not record.response["background"]:
            raise HttpError(
                400, "Only a response created with background: true can be cancelled.", code="not_background"
            )
        return json_response(record.response)

    @router.get(f"{path}/input_items", summary="What the model was shown", openapi_extra=asks(ItemsQuery))
    async def input_items(response_id: str, request: Request) -> Response:
        query = read_query(ItemsQuery, request)
        record = await responses.record(keys.owner(request.headers), response_id)
        items = record.input if query.order == "asc" else record.input[::-1]
        if query.after is not None:
            names = [item["id"] for item in items]
            if query.after not in names:
                raise bad_value("after", query.after, "the id of one of the items")
            items = items[names.index(query.after) + 1 :]
        page = items[: query.limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})
