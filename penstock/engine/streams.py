"""A client's live requests: bounded buffers between the engine's pace and each reader's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic

from penstock.config import limits
from penstock.config.errors import RequestError
from penstock.core.policies.waiting import Waiting, Work
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.engine import request_names
from penstock.engine.so_far import SoFar
from penstock.engine.watched_time import WatchedTime


def merge(outputs: Iterable[EngineOutput]) -> Iterator[EngineOutput]:
    """Joins the outputs of each sequence into one, in order of each sequence's first."""
    sequences: dict[int, list[EngineOutput]] = {}
    for output in outputs:
        sequences.setdefault(output.sequence, []).append(output)
    for group in sequences.values():
        first = next((output for output in group if output.cached_tokens is not None), group[-1])
        yield group[-1]._replace(
            tokens=tuple(token for output in group for token in output.tokens),
            logprobs=tuple(entry for output in group for entry in output.logprobs),
            prompt_logprobs=tuple(entry for output in group for entry in output.prompt_logprobs),
            cached_tokens=first.cached_tokens,
            queue_seconds=first.queue_seconds,
            missed=first.missed,
        )


class OutputStream:
    """The outputs of one request, for one reader. Ends after the last sequence's last output."""

    __slots__ = (
        *("_arrived", "_clock", "_close", "_error", "_events", "_last_read", "_said", "_scored", "_sent", "_waiter"),
        *("admitted", "closed", "open", "queued", "request", "unwanted", "whole", "work"),
    )

    def __init__(
        self, request: EngineRequest, work: Work, close: Callable[[OutputStream], None], clock: WatchedTime
    ) -> None:
        self.request = request
        self.work = work
        self.open = set(range(request.sampling.n))
        self.admitted = False
        self._arrived = self._sent = monotonic()  # here, and to the engine that has it now
        self.queued = True
        self.whole = True  # each sequence that has ended did so by itself
        self.closed = False
        self.unwanted = False  # an engine was told to cancel it
        self._said: tuple[list[int], ...] = tuple([] for _ in range(request.sampling.n))
        self._scored = 0
        self._clock = clock
        self._last_read = clock.seconds()
        self._close = close
        self._error: Exception | None = None
        self._events: deque[EngineOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> EngineOutput:
        while not self._events:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self.closed or not self.open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._last_read = self._clock.seconds()
        return self._events.popleft()

    async def aclose(self) -> None:
        """Cancels what still runs and drops what was not read; safe to call twice."""
        if not self.closed:
            self.closed = True
            self._events.clear()
            self._wake()
            self._close(self)

    @property
    def stalled(self) -> bool:
        """Whether outputs lie unread for longer than a reader may take."""
        return bool(self._events) and self._clock.seconds() - self._last_read > limits.STREAM_STALL_TIMEOUT_S

    @property
    def tokens(self) -> int:
        """Tokens generated for it so far."""
        return sum(map(len, self._said))

    def so_far(self) -> SoFar:
        """What another engine has to know to go on with it."""
        said = tuple(tuple(tokens) if number in self.open else None for number, tokens in enumerate(self._said))
        return SoFar(said, self._scored)

    def sent_again(self) -> None:
        """Another engine is sent the request, which waits since its first arrival."""
        self._sent = monotonic()

    def belongs_to(self, clock: WatchedTime, close: Callable[[OutputStream], None]) -> None:
        """Another table has it from now on: its clock, and what is told when the reader leaves."""
        self._clock, self._close = clock, close
        self._last_read = clock.seconds()

    def push(self, output: EngineOutput) -> None:
        """Buffers an output; a full buffer is compacted to one output a sequence, so no token is lost."""
        self.admitted = True
        self._said[output.sequence].extend(output.tokens)
        self._scored += len(output.prompt_logprobs)
        if output.finish_reason is not None:
            self.open.discard(output.sequence)
            self.whole &= output.finish_reason is FinishReason.STOP
        if self.closed:
            return
        if not self._events:
            self._last_read = self._clock.seconds()
        if output.queue_seconds is not None:
            output = output._replace(queue_seconds=output.queue_seconds + self._sent - self._arrived)
        self._events.append(output)
        if len(self._events) > limits.STREAM_BUFFER_EVENTS:
            self._events = deque(merge(self._events))
        self._wake()

    def refuse(self, error: Exception) -> None:
        """Ends the stream with an error, raised to the reader."""
        self._error = error
        self.open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamTable:
    """Live requests by id, and those of them that wait.

    A request counts as waiting until its first output from a step. A stream closed by its reader stays listed until
    the engine has confirmed its end, so that a late output never meets a new request of the same id.
    """

    def __init__(
        self, cancel: Callable[[str], None], max_queue_seconds: float | None = None, processes: int = 1
    ) -> None:
        """`cancel` tells the engine to end a request; `max_queue_seconds` and `processes` are for `Waiting`."""
        self._cancel = cancel
        self._clock = WatchedTime(limits.STREAM_STALL_TIMEOUT_S / 12)  # of deliveries: a pause is one of them
        self._live: dict[str, OutputStream] = {}
        self.waiting = Waiting(max_queue_seconds, processes)

    def __len__(self) -> int:
        return len(self._live)

    def open(self, request: EngineRequest) -> OutputStream:
        """Lists a request.

        Raises:
            OverloadedError: too many requests or prompt tokens wait already.
            RequestError: a live request has the same id.
        """
        if request.request_id in self._live:
            name = request_names.unnamed(request.request_id).removeprefix(f"{request.owner}:")
            raise RequestError(
                f"request_id {name[:80]!r} is in use by a running request; choose another, or none.",
                param="request_id",
                code="duplicate_request_id",
            )
        stream = OutputStream(request, self.waiting.enter(request), self._closed_by_reader, self._clock)
        self._live[request.request_id] = stream
        return stream

    def deliver(self, outputs: Iterable[EngineOutput]) -> None:
        """Hands outputs to their streams; those of unknown requests are dropped. Cancels streams nobody reads."""
        for output in outputs:
            stream = self._live.get(output.request_id)
            if stream is None or output.sequence not in stream.open:
                continue
            if output.cached_tokens is not None and output.sequence == 0:
                self.waiting.cached(len(stream.request.prompt_ids), output.cached_tokens)
            if output.tokens or output.cached_tokens is not None:
                self._dequeue(stream)
            stream.push(output)
            if not stream.open:
                self._forget(stream)
            elif stream.stalled:
                self._cancel(output.request_id)

    def wait_again(self, stream: OutputStream) -> None:
        """A request that had begun waits for another engine: its work counts as waiting again, less what it has."""
        if not stream.queued:
            stream.queued = True
            stream.work = self.waiting.enter_again(stream.request, stream.work, stream.tokens)

    def give_away(self, stream: OutputStream) -> None:
        """A request goes on in another engine, and in that one's table."""
        self._dequeue(stream)
        self._live.pop(stream.request.request_id, None)

    def adopt(self, stream: OutputStream) -> None:
        """A request that had begun in another engine waits for this one."""
        self._live[stream.request.request_id] = stream
        stream.belongs_to(self._clock, self._closed_by_reader)
        stream.queued = False
        self.wait_again(stream)

    def live(self) -> Sequence[OutputStream]:
        """Requests that have not ended, in order of arrival."""
        return list(self._live.values())

    def get(self, request_id: str) -> OutputStream | None:
        """The live request of that id."""
        return self._live.get(request_id)

    def is_live(self, stream: OutputStream) -> bool:
        return self._live.get(stream.request.request_id) is stream

    def refuse(self, request_id: str, error: Exception) -> None:
        """Ends a request that was not admitted: where its reader has seen nothing of it yet, with that error."""
        stream = self._live.get(request_id)
        if stream is None:
            return
        if stream.admitted:
            self.end(stream, FinishReason.ERROR, str(error))
        else:
            stream.refuse(error)
            self._forget(stream)

    def end(self, stream: OutputStream, reason: FinishReason, error: str | None = None) -> None:
        """Ends every unfinished sequence of a request."""
        for sequence in sorted(stream.open):
            stream.push(EngineOutput(stream.request.request_id, sequence, finish_reason=reason, error=error))
        self._forget(stream)

    def fail_all(self, message: str) -> None:
        """Ends every unfinished sequence with finish_reason ERROR and this message."""
        for stream in self.live():
            self.end(stream, FinishReason.ERROR, message)

    def _closed_by_reader(self, stream: OutputStream) -> None:
        if stream.open and self._live.get(stream.request.request_id) is stream:
            self._cancel(stream.request.request_id)

    def _dequeue(self, stream: OutputStream) -> None:
        if stream.queued:
            stream.queued = False
            self.waiting.leave(stream.request, stream.work)

    def _forget(self, stream: OutputStream) -> None:
        if not stream.queued and stream.request.pooling is None:
            self.waiting.answered(stream.tokens // stream.request.sampling.n, whole=stream.whole)
        self._dequeue(stream)
        self._live.pop(stream.request.request_id, None)
