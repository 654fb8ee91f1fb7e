"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import uuid
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import PenstockError, RequestError, spelled
from penstock.core.sampling import SamplingParams
from penstock.server.answer import Answer, EventStream, Service, event, while_connected
from penstock.server.auth import ApiKeys
from penstock.server.background import Job, Jobs
from penstock.server.body import read_json, read_query, validate
from penstock.server.dialects.responses.composer import Composer, Event
from penstock.server.dialects.responses.items import Item, checked_items, references
from penstock.server.dialects.responses.schema import InputTokensBody, ItemsQuery, ResponsesBody, RetrieveQuery
from penstock.server.dialects.responses.translate import (
    Call,
    check_combinations,
    prompt_request,
    sampling_of,
    sent_names,
)
from penstock.server.document import asks, gives, takes
from penstock.server.errors import HttpError, bad_value, json_response, shown
from penstock.server.responses_store import Record, ResponseStore

_EVENTS = "text/event-stream"


async def _nothing() -> None:
    pass


def _encoded(told: Event) -> bytes:
    return event(told, told["type"])


class Responses:
    """Runs, keeps and finds responses.

    Attributes:
        service: what runs them.
        store: where they are kept.
        jobs: those that run in the background.
    """

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self.service, self.store = service, store
        self.jobs = Jobs(service.lifecycle)

    async def aclose(self) -> None:
        """Ends what runs and closes the store."""
        await self.jobs.aclose()
        await self.store.aclose()

    async def record(self, owner: str, response_id: str) -> Record:
        """Raises HttpError 404 unless that owner has such a response."""
        record = await self.store.get(owner, response_id)
        if record is None:
            raise HttpError(404, f"Response with id {shown(response_id)} not found.", code="response_not_found")
        return record

    async def conversation(self, body: InputTokensBody, owner: str, suffix: str) -> list[Item]:
        """All items the model is shown: those of earlier responses, then the body's own."""
        earlier: list[Item] = []
        if body.previous_response_id is not None:
            found = await self.store.get(owner, body.previous_response_id)
            status = found.response["status"] if found else "not found"
            if found is None or status not in ("completed", "incomplete"):
                message = f"Previous response with id {shown(body.previous_response_id)}: {status.replace('_', ' ')}."
                raise RequestError(message, param="previous_response_id", code="previous_response_not_found")
            earlier = [*found.input, *found.response["output"]]
        known: dict[str, Item] = {}
        for name in references(body.input):  # ids of our own items hold that of their response
            record = await self.store.get(owner, "resp_" + name.split("_")[1]) if name.count("_") > 1 else None
            known |= {item["id"]: item for item in (record.input + record.response["output"] if record else ())}
        return earlier + checked_items(body.input, earlier, known, suffix)

    async def call(self, body: ResponsesBody, owner: str) -> Call:
        """Translates a body.

        Raises:
            RequestError: it is not acceptable.
        """
        check_combinations(body)
        name = uuid.uuid4().hex
        items = await self.conversation(body, owner, name)
        sampling = sampling_of(body, self.service.frontend.text.defaults)
        return Call(f"resp_{name}", owner, body, tuple(items), prompt_request(body, items, name, sampling))

    async def events(self, call: Call, composer: Composer, answer: Answer) -> AsyncIterator[Event]:
        """Everything that happens from here to the end; the response is kept before the last event tells of it."""
        yield composer.status("in_progress")
        try:
            async for _, delta in answer.deltas():
                for told in composer.take(delta):
                    yield told
            closing = composer.finish()
        except RequestError as error:
            closing = composer.fail(error)
        for told in closing:
            yield told
        composer.count(answer)
        last = composer.end()
        if call.stored and not call.body.background:
            await self.keep(call, composer.response)
        yield last

    async def keep(self, call: Call, response: Item, events: tuple[bytes, ...] = (), *, running: bool = False) -> None:
        """Stores a response. That it cannot be stored is no reason to lose the answer."""
        try:
            await self.store.put(call.owner, Record(response, list(call.input), events), running=running)
        except sqlite3.Error:
            logging.getLogger("penstock.server").exception("a response could not be stored")
            response["store"] = False

    async def background(self, call: Call) -> Job:
        """Starts a response that its client need not wait for."""
        self.jobs.check_room()
        composer = Composer(call, self.service.frontend)
        job = Job(call.owner, composer.response)
        job.tell(_encoded(composer.status("created")))
        job.tell(_encoded(composer.status("queued")))
        await self.keep(call, composer.response, running=True)
        self.jobs.start(call.id, job, lambda: self._work(call, composer, job))
        return job

    async def _work(self, call: Call, composer: Composer, job: Job) -> None:
        last: bytes | None = None
        try:
            answer = await Answer.open(self.service, [call.request])
            try:
                async for told in self.events(call, composer, answer):
                    if last is not None:
                        job.tell(last)
                    last = _encoded(told)
            finally:
                await answer.aclose()
        except asyncio.CancelledError:
            composer.response["status"] = "cancelled"
            last = _encoded(
                composer.event("error", code="cancelled", message="The response was cancelled.", param=None)
            )
        except Exception as error:
            if not isinstance(error, PenstockError):
                logging.getLogger("penstock.server").exception("%s failed", call.id)
            for told in composer.fail(error):
                job.tell(_encoded(told))
            last = _encoded(composer.end())
        assert last is not None
        await self.keep(call, composer.response, (*job.events, last))
        job.tell(last)


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
                yield _encoded(composer.status("created"))
                async for told in responses.events(call, composer, answer):
                    yield _encoded(told)

            return EventStream(events(), answer.aclose, service.lifecycle, failed=composer.broken)

        async def whole() -> None:
            async for _ in responses.events(call, composer, answer):
                pass

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
