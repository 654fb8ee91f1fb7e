"""Responses run, kept and found: what the routes have in common."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import uuid
from collections.abc import AsyncIterator, Iterator

from penstock.config.errors import PenstockError, RequestError
from penstock.server.answer import Answer, Service, event
from penstock.server.background import Job, Jobs
from penstock.server.dialects.responses.composer import Composer, Event
from penstock.server.dialects.responses.items import Item, checked_items, references
from penstock.server.dialects.responses.schema import InputTokensBody, ResponsesBody
from penstock.server.dialects.responses.translate import (
    Call,
    check_combinations,
    prompt_request,
    sampling_of,
)
from penstock.server.errors import HttpError, not_ready, shown
from penstock.server.fitting import shortened
from penstock.server.responses_store import Record, ResponseStore


def encoded(told: Event) -> bytes:
    """A server-sent event."""
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
        for name in {name.split("_")[1] for name in references(body.input) if "_" in name}:
            record = await self.store.get(owner, f"resp_{name}")  # ids of our own items hold that of their response
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
        request = prompt_request(body, items, name, sampling)
        if body.truncation == "auto":
            self.service.require_ready()
            request = await shortened(self.service.frontend, request)
        return Call(f"resp_{name}", owner, body, tuple(items), request)

    async def events(self, call: Call, composer: Composer, answer: Answer) -> AsyncIterator[Event]:
        """Everything that happens from here to the last event, which is `ended`'s."""
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

    async def ended(self, call: Call, composer: Composer) -> Event:
        """The last event; the response is kept before it is told."""
        last = composer.end()
        if call.stored:
            await self.keep(call, composer.response)
        return last

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
        job.tell(encoded(composer.status("created")))
        job.tell(encoded(composer.status("queued")))
        await self.keep(call, composer.response, running=True)
        self.jobs.start(call.id, job, lambda: self._work(call, composer, job))
        return job

    async def _work(self, call: Call, composer: Composer, job: Job) -> None:
        try:
            answer = await Answer.open(self.service, [call.request])
            try:
                async for told in self.events(call, composer, answer):
                    job.tell(encoded(told))
            finally:
                await answer.aclose()
            closing: Iterator[Event] = iter(())
        except asyncio.CancelledError:
            shut = self.service.lifecycle.aborted.is_set()
            closing = (
                composer.fail(not_ready("The server was shut down.", "shutting_down")) if shut else composer.cancel()
            )
        except Exception as error:
            if not isinstance(error, PenstockError):
                logging.getLogger("penstock.server").exception("%s failed", call.id)
            closing = composer.fail(error)
        for told in closing:
            job.tell(encoded(told))
        last = encoded(composer.end())
        try:
            await asyncio.shield(self.keep(call, composer.response, (*job.events, last)))
        finally:
            job.tell(last)
