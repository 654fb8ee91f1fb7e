"""The requests of this process over a line to an engine process, and between two such processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from dataclasses import replace

from penstock.config.counting import ended, together
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import EngineDeadError, RequestError
from penstock.core.policies.pause import Control
from penstock.core.request import EngineRequest, FinishReason
from penstock.engine import messages, request_names
from penstock.engine.messages import MessageError
from penstock.engine.streams import OutputStream, StreamTable
from penstock.host.resumption import CANNOT_GO_ON, Past, Resumption

STATS_TIMEOUT_S = 1.0
Send = Callable[[bytes], None]
"""Sends an encoded command; raises EngineDeadError where nobody is there to take it."""
_log = logging.getLogger(__name__)


class EngineLine:
    """What a client of an engine process knows of its requests, whoever watches the process."""

    def __init__(self, client: str = "", max_queue_seconds: float | None = None, processes: int = 1) -> None:
        """`client` is the name under which one of several `processes`, which did not start the engine, is attached."""
        self.client = client
        self.streams = StreamTable(self._cancel, max_queue_seconds, processes)
        self.resumption = Resumption(self.streams, self._send_again)
        self.restarts = 0
        self._send: Send | None = None
        self.past = EngineStats()  # counters of engines that are gone
        self._latest = EngineStats()
        self._stats_answer: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._send is not None

    def open(self, send: Send, *, waits: bool = False) -> None:
        """An engine is there: requests of one before it go on, unless they wait for their `turn`."""
        self._send = send
        self.resumption.waits = waits
        self.resumption.go_on()

    def turn(self) -> None:
        """Requests may be sent to the engine."""
        self.resumption.waits = False
        self.resumption.go_on()

    def cut(self, worked_on: Set[str] | None) -> None:
        """The engine has gone. It worked on these requests; None where nobody knows on which."""
        self._close_line()
        alone = all(request_names.client_of(name) == self.client for name in worked_on or ())
        self.resumption.died(worked_on, alone=alone)

    def end(self, why: str) -> None:
        """There will be no engine any more."""
        self._close_line()
        self.streams.fail_all(why)

    def _close_line(self) -> None:
        self._send = None
        self.past, self._latest = ended(together(self.past, self._latest)), EngineStats()
        self._answer_stats()

    def submit(self, request: EngineRequest) -> OutputStream:
        """Queues a request; as `EngineClient.submit`."""
        if self._send is None:
            raise EngineDeadError("The engine process is gone.")
        if (name := request_names.named(self.client, request.request_id)) != request.request_id:
            request = replace(request, request_id=name)
        try:
            frame = messages.encode(messages.Submit(request))
        except MessageError as error:
            raise RequestError(f"The request cannot be sent to the engine: {error}") from error
        stream = self.streams.open(request)
        if not self.resumption.hold(stream):
            self._send(frame)
        return stream

    def adopt(self, stream: OutputStream, past: Past) -> None:
        """A request of another engine goes on here, from what is known of its answers."""
        self.streams.adopt(stream)
        self.resumption.adopt(stream, past)

    def leave(self, stream: OutputStream) -> None:
        """A request goes on elsewhere: what the engine, which is there, still says of it counts for nothing."""
        name = stream.request.request_id
        if self.resumption.holds(stream):
            self.resumption.drop(stream)
        elif self._send is not None:
            with contextlib.suppress(EngineDeadError, MessageError):
                self._send(messages.encode(messages.Cancel(name)))
        self.streams.give_away(stream)
        self.resumption.go_on()  # it may have been the one on trial

    def _send_again(self, stream: OutputStream) -> None:
        """Sends a request; to an engine that has gone it is as if it had not been."""
        try:
            frame = messages.encode(messages.Submit(stream.request, stream.so_far() if stream.admitted else None))
        except MessageError:
            _log.exception("a request cannot go on in another engine")
            self.streams.end(stream, FinishReason.ERROR, CANNOT_GO_ON)
            return
        if self._send is not None:
            with contextlib.suppress(EngineDeadError):
                self._send(frame)

    def arriving(self, owner: str) -> AbstractContextManager[None]:
        return self.streams.waiting.arriving(owner)

    def check_room(self, owner: str) -> None:
        self.streams.waiting.check_room(owner)

    def cancel(self, request_id: str) -> None:
        """As `EngineClient.cancel`."""
        self._cancel(request_names.named(self.client, request_id))

    def _cancel(self, request_id: str) -> None:
        stream = self.streams.get(request_id)
        if stream is None:
            return
        held = self.resumption.holds(stream)
        if held:
            self.resumption.drop(stream)
        if held or self._send is None:
            self.streams.end(stream, FinishReason.CANCELLED)  # no engine has it
            return
        stream.unwanted = True
        with contextlib.suppress(EngineDeadError, MessageError):
            self._send(messages.encode(messages.Cancel(request_id)))

    def end_reasoning(self, request_id: str) -> None:
        """As `EngineClient.end_reasoning`; an engine that the request comes to later ends it too."""
        name = request_names.named(self.client, request_id)
        stream = self.streams.get(name)
        if stream is None or (thinking := stream.request.thinking) is None:
            return
        stream.request = replace(stream.request, thinking=replace(thinking, budget=0))
        if self._send is not None and not self.resumption.holds(stream):
            with contextlib.suppress(EngineDeadError):
                self._send(messages.encode(messages.EndReasoning(name)))

    def control(self, control: Control) -> None:
        """As `EngineClient.control`."""
        if self._send is not None:
            with contextlib.suppress(EngineDeadError):
                self._send(messages.encode(messages.Tell(control)))

    def own(self) -> EngineStats:
        """What this process knows of its requests, which no engine counts."""
        return EngineStats(waiting_seconds=self.streams.waiting.seconds(), resumed=self.resumption.resumed)

    async def stats(self, *, ask: bool) -> EngineStats:
        """The newest snapshot: with `ask` the engine's own, unless it is silent for STATS_TIMEOUT_S.

        Counters go on from those last known of engines that are gone; nothing runs in these.
        """
        if ask and self._send is not None:
            if self._stats_answer is None:
                self._stats_answer = asyncio.get_running_loop().create_future()
                with contextlib.suppress(EngineDeadError):  # whose end is told soon
                    self._send(messages.encode(messages.StatsQuery(self.client)))
            await asyncio.wait((self._stats_answer,), timeout=STATS_TIMEOUT_S)
        own, counted = self.own(), together(self.past, self._latest)
        return replace(counted, waiting_seconds=own.waiting_seconds, restarts=self.restarts, resumed=own.resumed)

    def on_event(self, event: messages.Event) -> None:
        """Takes what the engine tells."""
        match event:
            case messages.Outputs(outputs=outputs):
                self.streams.deliver(outputs)
                self.resumption.go_on()
            case messages.Refused(request_id=request_id):
                self.streams.refuse(request_id, messages.refusal_error(event))
                self.resumption.go_on()
            case messages.Paced(pace=pace):
                self.streams.waiting.pace = pace
            case messages.Stats(stats=stats):
                self._latest = stats
                self._answer_stats()

    def _answer_stats(self) -> None:
        answer, self._stats_answer = self._stats_answer, None
        if answer is not None and not answer.done():
            answer.set_result(None)
