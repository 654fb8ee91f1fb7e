"""Responses run, kept and found: what the routes have in common."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from starlette.requests import Request

from penstock.config.errors import PenstockError, RequestError
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.server.account import RequestAccount
from penstock.server.active_call import ActiveCall, typed_event
from penstock.server.auth import owner_of
from penstock.server.body import translated
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.conversations.kept import Conversations, with_items
from penstock.server.dialects.responses.composer import Composer, Event
from penstock.server.dialects.responses.items import Item, checked_items, references
from penstock.server.dialects.responses.schema import InputTokensBody, ResponsesBody
from penstock.server.dialects.responses.service.background import Job, Jobs
from penstock.server.dialects.responses.service.fitting import shortened
from penstock.server.dialects.responses.socket.turn import RecentResponses, turn_of
from penstock.server.dialects.responses.translate import (
    ResponsesCall,
    check_combinations,
    check_continuation,
    prompt_request,
    sampling_of,
)
from penstock.server.errors import code_of, not_ready
from penstock.server.reports import RequestReports
from penstock.server.store import Record, ResponseStore

_PATH = "/v1/responses"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is shown.

    Attributes:
        items: all of it, those of earlier responses or of the conversation first.
        earlier: how many these are.
        request: what they make.
    """

    items: list[Item]
    earlier: int
    request: GenerationRequest


class Responses:
    """Runs, keeps and finds responses.

    Attributes:
        context: what runs them.
        store: where they are kept.
        jobs: those that run in the background.
        reports: where these are told when they have ended.
        conversations: what they go on from and add to.
        recent: responses that are not kept, which their WebSockets go on from.
    """

    def __init__(self, context: ServerContext, store: ResponseStore, reports: RequestReports) -> None:
        self.context, self.store = context, store
        self.reports = reports
        self.conversations = Conversations(store)
        self.recent = RecentResponses()
        self.jobs = Jobs(context.lifecycle)

    async def aclose(self) -> None:
        """Ends what runs and closes the store."""
        await self.jobs.aclose()
        await self.store.aclose()

    async def stopped(self, owner: str, response_id: str) -> Record:
        """A response that is there, cancelled if it runs."""
        if (job := self.jobs.get(owner, response_id)) is not None:
            await job.cancel()
        return await self.store.found(owner, response_id)

    async def prompt(self, sent: Request, body: InputTokensBody, sampling: SamplingParams) -> Prompt:
        """What the model is shown; raises RequestError for what cannot be, HttpError 404 without its conversation."""
        check_continuation(body)
        owner = owner_of(sent)
        earlier: list[Item] = []
        conversation, size = None, 0
        if body.previous_response_id is not None:
            turn = turn_of(sent)
            recent = None if turn is None else turn.find(body.previous_response_id)
            previous = recent or await self.store.previous(owner, body.previous_response_id)
            earlier, size = [*previous.items, *previous.object["output"]], previous.size
        elif body.conversation_id is not None:
            conversation = await self.conversations.found(owner, body.conversation_id)
            earlier, size = conversation.items, conversation.size
        known = await self.store.items(owner, references(body.input))
        request_id = uuid.uuid4().hex
        new = await translated(sent, checked_items, body.input, earlier, known, request_id, besides=size)
        items = earlier + new
        if conversation is not None:
            await translated(sent, with_items, conversation, new, "input", besides=size)
        request = await translated(sent, prompt_request, body, items, request_id, sampling, besides=size)
        return Prompt(items, len(earlier), replace(request, owner=owner))

    async def call(self, sent: Request, body: ResponsesBody, model: ModelContext) -> ResponsesCall:
        """Translates a body.

        Raises:
            RequestError: it is not acceptable.
        """
        check_combinations(body)
        prompt = await self.prompt(sent, body, sampling_of(body, model.frontend.text.defaults))
        request = prompt.request
        if body.truncation == "auto":
            model.require_ready()
            request = await shortened(model.frontend, request)
        return ResponsesCall(f"resp_{request.request_id}", body, tuple(prompt.items), request, prompt.earlier)

    async def told(self, call: ResponsesCall, composer: Composer, active: ActiveCall) -> AsyncIterator[Event]:
        """All that happens; the response is kept before the last is told."""
        yield composer.status("created")
        async for told in self._events(composer, active):
            yield told
        last = composer.end()
        await self._remember(call, composer.response)
        if call.stored:
            await self.keep(call, composer.response)
        yield last

    async def _events(self, composer: Composer, active: ActiveCall) -> AsyncIterator[Event]:
        """What happens while it runs."""
        yield composer.status("in_progress")
        failure = None
        try:
            async for _, delta in active.deltas():
                for told in composer.take(delta):
                    yield told
        except RequestError as error:
            failure = error
        for told in composer.finish(failure):
            yield told
        composer.count(active.prompt_tokens, active.cached_tokens)

    async def _remember(self, call: ResponsesCall, response: Item) -> None:
        """Adds a response that has come to its end to the conversation that it belongs to."""
        name = call.body.conversation_id
        if name is not None and response["status"] in ("completed", "incomplete"):
            said = [*call.input[call.earlier :], *response["output"]]
            await self.conversations.remember(call.request.owner, name, said)

    async def keep(self, call: ResponsesCall, response: Item, events: tuple[bytes, ...] = ()) -> None:
        """Stores a response. That it cannot be stored is no reason to lose the answer."""
        record = Record(response, list(call.input), events)
        if not await self.store.keep(call.request.owner, record, running=response["status"] == "queued"):
            response["store"] = False

    async def background(self, call: ResponsesCall, model: ModelContext) -> Job:
        """Starts a response that its client need not wait for; raises RequestError where others could not find it."""
        if self.store.is_shared:
            raise RequestError(
                "background is true, but this server has several HTTP processes, of which the next call may meet "
                "another; leave it out, or start the server without --api-server-count.",
                param="background",
                code="unsupported_value",
            )
        self.jobs.check_room()
        model.frontend.client.check_room(call.request.owner)
        composer = Composer(call, model)
        job = Job(call.request.owner, composer.response)
        job.tell(typed_event(composer.status("created")))
        job.tell(typed_event(composer.status("queued")))
        await self.keep(call, composer.response)
        again = model.again()
        self.jobs.start(call.id, job, lambda: self._work(call, composer, job, again), again.release)
        return job

    async def _work(self, call: ResponsesCall, composer: Composer, job: Job, model: ModelContext) -> None:
        account = RequestAccount(call.id, "POST", _PATH, call.request.owner, route=_PATH, status=200)
        self.reports.begin(account)
        try:
            await self._answer(call, composer, job, model, account)
        finally:
            account.seconds = time.monotonic() - account.started
            self.reports.end(account)

    async def _answer(
        self, call: ResponsesCall, composer: Composer, job: Job, model: ModelContext, account: RequestAccount
    ) -> None:
        request = call.request
        try:
            async with await ActiveCall.open(model, [request], owner=request.owner, account=account) as active:
                async for told in self._events(composer, active):
                    job.tell(typed_event(told))
        except (asyncio.CancelledError, Exception) as error:
            if not isinstance(error, (asyncio.CancelledError, PenstockError)):
                logging.getLogger("penstock.server").exception("%s failed", call.id)
            account.error = code_of(error)
            shut = self.context.lifecycle.aborted.is_set()
            failure = not_ready("The server was shut down.", "shutting_down") if shut else error
            for told in composer.finish(failure):
                job.tell(typed_event(told))
        last = typed_event(composer.end())
        try:
            await asyncio.shield(self._remember(call, composer.response))
            await asyncio.shield(self.keep(call, composer.response, (*job.events, last)))
        finally:
            job.tell(last)
