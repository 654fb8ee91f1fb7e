"""Running a request for a client who may leave: opening generations, measuring, streaming, cancelling."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.config import limits
from penstock.config.errors import (
    CLIENT_FAILURES,
    AbortedError,
    ContextLengthError,
    RequestError,
)
from penstock.config.generation import GenerationRequest
from penstock.core.request import FinishReason
from penstock.engine.api import Delta
from penstock.engine.generation import TextGeneration
from penstock.search.beam import BeamParams, beam_search
from penstock.search.best_of import BestOf, best_of
from penstock.server.account import ACCOUNT, RequestAccount, account_of
from penstock.server.auth import owner_of
from penstock.server.clock import Clock, pace, spoken
from penstock.server.connected import cancel_all, disconnected, while_connected
from penstock.server.connection import ABORT
from penstock.server.context import ModelContext
from penstock.server.deadline import gone
from penstock.server.encoding import encode_json, joined_json, json_answer
from penstock.server.errors import ClientGone, HttpError, code_of, describe, not_ready
from penstock.server.lifecycle import Lifecycle
from penstock.server.metrics import ModelMetrics
from penstock.server.patience import patience
from penstock.server.prompts import check_shared
from penstock.server.slots import left_in_its_slot

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

_NEVER_S = 1e9  # that a stream may be silent
_KEEPALIVE = b": keep-alive\n\n"
_OPENED_TOGETHER = 4  # of many prompts, so that others get their turn between


class GenerationError(HttpError):
    """A sequence failed after admission: 400 where the request would always fail, which no client should retry; 503
    where an operator ended it, after which the same request may be answered."""

    def __init__(self, message: str | None, *, cancelled: bool = False) -> None:
        """`cancelled`: somebody ended it."""
        self.cancelled = cancelled
        code = CLIENT_FAILURES.get(message or "")
        if cancelled and message is None:
            aborted = AbortedError()
            super().__init__(aborted.status, str(aborted), code=aborted.code, headers={"Retry-After": "1"})
            return
        message = message or "The generation was ended before it was complete."
        super().__init__(500 if code is None else 400, message, code=code or "generation_failed")


async def _start(
    frontend: Frontend, request: GenerationRequest, beams: BeamParams | None, best: int | None
) -> TextGeneration | BestOf:
    if beams is not None:
        return await beam_search(frontend, request, beams)
    return await frontend.generate(request) if best is None else await best_of(frontend, request, best)


@dataclass(slots=True)
class ActiveCall:
    """The running generations of one call, in the order of its prompts; `at_end` is called when it is closed.

    `said` are the tokens of its first answer, where somebody wants to know them.
    """

    requests: Sequence[GenerationRequest]
    generations: Sequence[TextGeneration | BestOf]
    metrics: ModelMetrics
    started: float
    account: RequestAccount | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    said: list[int] | None = None
    _clocks: list[defaultdict[int, Clock]] = field(init=False)  # of each prompt, by the number of its sequence
    _tasks: list[asyncio.Future[None]] = field(default_factory=list)
    _ended: int = 0
    _closed: bool = False

    def __post_init__(self) -> None:
        self._clocks = [defaultdict(Clock) for _ in self.generations]

    @classmethod
    async def open(
        cls,
        context: ModelContext,
        requests: Sequence[GenerationRequest],
        beams: BeamParams | None = None,
        best: int | None = None,
        *,
        owner: str,
        account: RequestAccount | None = None,
    ) -> ActiveCall:
        """Starts all, for one owner; if one is refused, none runs and the first refusal is raised.

        What they cost is written into `account`, where one is kept.

        They are generated; or searched with `beams`, or so many sequences are and the `best` of them told.
        """
        started = time.monotonic()
        if account is not None:
            account.model, account.sampling = context.model, requests[0].sampling
        requests = [replace(request, owner=owner) for request in requests]
        check_shared(requests)
        told = context.lifecycle.told
        taken = told.take(requests, context.frontend.text.vocab_size)
        adapter, metrics = context.model if context.frontend.adapters else "", context.metrics
        tasks: list[asyncio.Future[TextGeneration | BestOf]] = []
        with context.frontend.client.arriving(owner), metrics.adapters.waiting(adapter):
            try:
                for number, request in enumerate(requests, 1):
                    tasks.append(asyncio.ensure_future(_start(context.frontend, request, beams, best)))
                    if number % _OPENED_TOGETHER == 0:
                        await asyncio.sleep(0)
                generations = await asyncio.gather(*tasks)
            except BaseException as error:
                told.give_back(requests, taken)
                if isinstance(error, asyncio.CancelledError):
                    for _ in range(sum(request.sampling.n for request in requests)):
                        context.metrics.finished(FinishReason.CANCELLED.value)
                for task in tasks:
                    task.cancel()
                for result in await asyncio.gather(*tasks, return_exceptions=True):
                    if not isinstance(result, BaseException):
                        await result.aclose()
                raise
        metrics.adapters.run(adapter, 1)
        call = cls(requests, generations, metrics, started, account)
        call.at_end += [partial(told.give_back, requests, taken), partial(metrics.adapters.run, adapter, -1)]
        if account is not None:
            account.prompt_tokens = call.prompt_tokens
        return call

    @property
    def prompt_tokens(self) -> int:
        return sum(len(generation.prompt_ids) for generation in self.generations)

    @property
    def cached_tokens(self) -> int:
        return sum(generation.cached_tokens for generation in self.generations)

    def timings(self, prompt: int | None = None, sequence: int = 0) -> dict[str, Any]:
        """Tokens and milliseconds so far, of one sequence or (no `prompt`) of all, as llama-server tells them.

        The prompt's time ends with the first token; tokens from the prefix cache are counted apart.
        """
        if prompt is None:
            clocks = self._spoken()
        elif (clock := self._clocks[prompt].get(sequence)) is not None:
            clocks = [clock]
        else:
            clocks = spoken(self._clocks[prompt])
        of = self.generations if prompt is None else [self.generations[prompt]]
        cached = sum(generation.cached_tokens for generation in of)
        missed = ", ".join(sorted({generation.missed for generation in of if generation.missed}))
        computed = sum(len(generation.prompt_ids) for generation in of) - cached
        queued = min((generation.queue_seconds or 0.0 for generation in of), default=0.0)
        first = min((clock.first for clock in clocks), default=self.started)
        last = max((clock.last for clock in clocks), default=first)
        drafted, accepted = self.drafts if prompt is None else of[0].drafts.get(sequence, (0, 0))
        return {
            "cache_n": cached,
            **({"cache_miss": missed} if missed else {}),
            **pace("prompt", computed, first - self.started - queued),
            **pace("predicted", sum(clock.tokens for clock in clocks), last - first),
            **({"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}),
        }

    @property
    def drafts(self) -> tuple[int, int]:
        """Of all sequences: how many drafts were verified so far, and how many of those were right."""
        every = [counts for generation in self.generations for counts in generation.drafts.values()]
        return sum(drafted for drafted, _ in every), sum(accepted for _, accepted in every)

    def draft_details(self) -> dict[str, int]:
        """The same under OpenAI's names for predictions; nothing where there were no drafts."""
        drafted, accepted = self.drafts
        found = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return found if drafted else {}

    def _spoken(self) -> list[Clock]:
        """Of all sequences that have tokens."""
        return [clock for clocks in self._clocks for clock in spoken(clocks)]

    def prompt_progress(self, prompt: int) -> dict[str, Any]:
        """How much of a prompt is computed, as llama-server tells it; at the first delta all of it is."""
        generation, ms = self.generations[prompt], self.timings(prompt)["prompt_ms"]
        total = len(generation.prompt_ids)
        return {"total": total, "cache": generation.cached_tokens, "processed": total, "time_ms": int(ms)}

    async def to_the_end(self) -> None:
        """Has it answered, and tells nobody."""
        async for _ in self.deltas():
            pass

    async def deltas(self, *, cancelled: bool = False) -> AsyncIterator[tuple[int, Delta]]:
        """(number of the prompt, delta) as they arrive.

        Args:
            cancelled: a cancelled sequence ends by such a delta and the others go on; otherwise it is an error.

        Raises:
            GenerationError: a sequence failed.
        """
        if len(self.generations) == 1:
            async for delta in self.generations[0]:
                self._observe(0, delta, cancelled=cancelled)
                yield 0, delta
            return
        buffer: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue(limits.READ_AHEAD_EVENTS)
        self._tasks = [asyncio.ensure_future(_forward(i, item, buffer)) for i, item in enumerate(self.generations)]
        running = len(self._tasks)
        while running:
            item = await buffer.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                self._observe(*item, cancelled=cancelled)
                yield item

    def _observe(self, index: int, delta: Delta, *, cancelled: bool) -> None:
        now, metrics = time.monotonic(), self.metrics
        clock = self._clocks[index][delta.index]
        if delta.token_ids:
            if self.said is not None and not (index or delta.index):
                self.said += delta.token_ids
            if clock.tokens:
                metrics.inter_token.observe(now - clock.last)
            else:
                metrics.first_token.observe(now - self.started)
                clock.first = now
            clock.last = now
            clock.tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            return
        self._ended += 1
        self._count_end(delta.finish_reason)
        if delta.finish_reason is FinishReason.CANCELLED and cancelled:
            return
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            raise GenerationError(delta.error, cancelled=delta.finish_reason is FinishReason.CANCELLED)
        if clock.tokens > 1:
            metrics.per_token.observe((clock.last - clock.first) / (clock.tokens - 1))

    async def __aenter__(self) -> ActiveCall:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels what still runs and counts the call; safe to call twice and after the end."""
        if self._closed:
            return
        self._closed = True
        for tell in self.at_end:
            tell()
        await cancel_all(self._tasks)
        for generation in self.generations:
            await generation.aclose()
        for _ in range(sum(request.sampling.n for request in self.requests) - self._ended):
            self._count_end(FinishReason.CANCELLED)
        if any(self._clocks):
            self.metrics.request.observe(time.monotonic() - self.started)
        for index, (request, generation) in enumerate(zip(self.requests, self.generations, strict=True)):
            told = spoken(self._clocks[index])
            self.metrics.request_prompt.observe(len(generation.prompt_ids))
            self.metrics.request_generation.observe(sum(clock.tokens for clock in told))
            self.metrics.params_n.observe(request.sampling.n)
            if request.sampling.max_tokens is not None:
                self.metrics.params_max_tokens.observe(request.sampling.max_tokens)
            if generation.queue_seconds is not None and told:
                first, last = min(clock.first for clock in told), max(clock.last for clock in told)
                self.metrics.phases(generation.queue_seconds, first - self.started, last - self.started)
        if self.account is not None:
            self._write_down(self.account)

    def _count_end(self, reason: FinishReason) -> None:
        self.metrics.finished(reason.value)
        if self.account is not None:
            self.account.finished[reason.value] += 1

    def _write_down(self, account: RequestAccount) -> None:
        """What the call cost."""
        account.prompt_tokens, account.cached_tokens = self.prompt_tokens, self.cached_tokens
        account.missed = Counter(generation.missed for generation in self.generations if generation.missed)
        told = self._spoken()
        account.output_tokens = sum(clock.tokens for clock in told)
        queued = [each.queue_seconds for each in self.generations if each.queue_seconds is not None]
        if queued:
            account.queued = min(queued) + self.started - account.started
        if told:
            account.first_token = min(clock.first for clock in told) - account.started
            account.last_token = max(clock.last for clock in told) - account.started


async def _forward(
    index: int, generation: TextGeneration | BestOf, buffer: asyncio.Queue[tuple[int, Delta] | BaseException | None]
) -> None:
    try:
        async for delta in generation:
            await buffer.put((index, delta))
        await buffer.put(None)
    except Exception as error:
        await buffer.put(error)


async def open_call_within_context(sent: Request, context: ModelContext, request: GenerationRequest) -> ActiveCall:
    """As `open_call`; who asks for more tokens than the context has room for gets as many as there is room."""
    opening = _open_within_context(context, request, account_of(sent))
    return left_in_its_slot(await while_connected(opening, sent.receive, context.lifecycle), sent, context)


async def _open_within_context(
    context: ModelContext, request: GenerationRequest, account: RequestAccount
) -> ActiveCall:
    owner = account.owner
    unbounded = replace(request, sampling=replace(request.sampling, max_tokens=None))
    wanted, room = request.sampling.max_tokens, context.max_model_len()
    if wanted is not None and room is not None and wanted >= room:
        return await ActiveCall.open(context, [unbounded], owner=owner, account=account)
    try:
        return await ActiveCall.open(context, [request], owner=owner, account=account)
    except ContextLengthError as error:
        if error.param != "max_tokens":
            raise
    return await ActiveCall.open(context, [unbounded], owner=owner, account=account)


async def open_call(
    request: Request,
    context: ModelContext,
    requests: Sequence[GenerationRequest],
    beams: BeamParams | None = None,
    best: int | None = None,
) -> ActiveCall:
    """As `ActiveCall.open`, for the client who sent this and may leave meanwhile."""
    opening = ActiveCall.open(context, requests, beams, best, owner=owner_of(request), account=account_of(request))
    return left_in_its_slot(await while_connected(opening, request.receive, context.lifecycle), request, context)


async def complete(
    body: Coroutine[Any, Any, object], active: ActiveCall, receive: Receive, lifecycle: Lifecycle
) -> Response:
    """The whole answer as JSON, whose generations end when the client leaves or the server aborts."""
    try:
        return await json_answer(await while_connected(body, receive, lifecycle))
    finally:
        await active.aclose()


class EventStream(Response):
    """Server-sent events, or lines, written as they come, several in a piece when they come faster than they are sent.

    Sends `keepalive` when nothing happened for `keepalive_s` seconds (`limits.SSE_KEEPALIVE_S` unless told); ends with
    what `failed` makes of the error when the generation fails or the server aborts; cancels the generation when the
    client leaves, or reads nothing for `limits.STREAM_STALL_TIMEOUT_S`.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]] | None,
        lifecycle: Lifecycle,
        *,
        failed: Callable[[BaseException], bytes] | None = None,
        keepalive: bytes = _KEEPALIVE,
        keepalive_s: float | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._lifecycle = lifecycle
        self._failed = failed or error_event
        self._keepalive = keepalive
        self._keepalive_s = limits.SSE_KEEPALIVE_S if keepalive_s is None else keepalive_s
        self._buffer: asyncio.Queue[bytes | None] = asyncio.Queue(limits.READ_AHEAD_EVENTS)
        self._account: RequestAccount | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._account = scope.get(ACCOUNT)
        tasks: tuple[asyncio.Future[Any], ...] = ()
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            produce = asyncio.ensure_future(self._produce())
            write = asyncio.ensure_future(self._write(scope, send))
            left = asyncio.ensure_future(disconnected(receive))
            aborted = asyncio.ensure_future(self._lifecycle.aborted.wait())
            tasks = (produce, write, left, aborted)
            await asyncio.wait((write, left, aborted), return_when=asyncio.FIRST_COMPLETED)
            if write.done():
                write.result()
                return
            end = gone(left.result()) if left.done() else not_ready("The server is shutting down.", "shutting_down")
            if isinstance(end, ClientGone):
                raise end
            await cancel_all((write,))
            await send_within(scope, send, self._last(end), more=False)
        finally:
            await cancel_all(tasks)
            if self._close is not None:
                await self._close()

    async def _produce(self) -> None:
        try:
            async for event in self._events:
                await self._buffer.put(event)
        except Exception as error:
            if not isinstance(error, RequestError):
                logging.getLogger("penstock.server").exception("a stream failed")
            await self._buffer.put(self._last(error))
        await self._buffer.put(None)

    def _last(self, error: BaseException) -> bytes:
        """What ends a stream that failed."""
        if self._account is not None:
            self._account.error = code_of(error)
        return self._failed(error)

    async def _write(self, scope: Scope, send: Send) -> None:
        more = True
        while more:
            pieces: list[bytes | None]
            try:
                async with patience(self._keepalive_s):
                    pieces = [await self._buffer.get()]
            except TimeoutError:
                pieces = [self._keepalive]
            with suppress(asyncio.QueueEmpty):
                while True:
                    pieces.append(self._buffer.get_nowait())
            more = pieces[-1] is not None
            await send_within(scope, send, b"".join(piece for piece in pieces if piece is not None), more=more)


async def send_within(scope: Scope, send: Send, body: bytes, *, more: bool) -> None:
    """Sends a piece of a stream; a client that reads nothing for `limits.STREAM_STALL_TIMEOUT_S` has gone."""
    try:
        async with patience(limits.STREAM_STALL_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": more})
    except TimeoutError:
        scope.get("extensions", {}).get(ABORT, {}).get("call", lambda: None)()
        raise ClientGone from None


def ping_s(interval: int | None) -> float | None:
    """Seconds of silence before a stream sends a comment, by llama-server's field: -1 for none, 0 or null ours."""
    return _NEVER_S if interval == -1 else interval or None


def event(body: object, name: str = "") -> bytes:
    """One server-sent event, under a name where its dialect gives events names."""
    head = b"event: %s\n" % name.encode() if name else b""
    return head + b"data: " + encode_json(body) + b"\n\n"


def large_event(body: object) -> bytes:
    """As `event`, for a thread beside the event loop."""
    return b"data: " + joined_json(body) + b"\n\n"


def typed_event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event, under the name of its type."""
    return event(body, body["type"])


def error_event(error: BaseException) -> bytes:
    """An OpenAI error object as the last event of a stream that failed."""
    return event(describe(error)[1])
