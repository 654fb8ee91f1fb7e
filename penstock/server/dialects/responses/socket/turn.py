"""A turn of a WebSocket, as the routes know it: what it goes on from though nothing is kept, and what it leaves."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.requests import Request

from penstock.config import limits
from penstock.config.generation import GenerationRequest
from penstock.server.active_call import ActiveCall
from penstock.server.dialects.responses.composer import Composer, Event
from penstock.server.dialects.responses.translate import ResponsesCall
from penstock.server.store import Record

TURN: Final = "penstock.responses.turn"
"""Where an ASGI scope has the Turn that its request is."""
_TOKEN_BYTES = 16  # of a response, for each token of its output, about


class RecentResponses:
    """The last response of each stream of each connection, of those that are kept nowhere else; bounded in size."""

    def __init__(self, most: int = limits.MAX_RECENT_RESPONSES_BYTES) -> None:
        self._most, self._held = most, 0
        self._records: OrderedDict[tuple[object, str], Record] = OrderedDict()

    def find(self, connection: object, stream: str) -> Record | None:
        return self._records.get((connection, stream))

    def put(self, connection: object, stream: str, record: Record) -> None:
        """In place of the stream's last; what has been there longest makes room."""
        self.drop(connection, stream)
        self._records[connection, stream] = record
        self._held += record.size
        while self._held > self._most:
            self._held -= self._records.popitem(last=False)[1].size

    def drop(self, connection: object, stream: str) -> None:
        record = self._records.pop((connection, stream), None)
        self._held -= 0 if record is None else record.size


@dataclass(slots=True)
class Turn:
    """One `response.create`.

    Attributes:
        recent: where the responses of its connection are.
        connection: which that is.
        stream: of the connection, "" for the one without a name.
        streams: names of all of them.
        generate: whether there is an answer; else the prompt is computed, so that what goes on from it starts sooner.
        size: bytes of the message, and of what it goes on from.
    """

    recent: RecentResponses
    connection: object
    stream: str
    streams: tuple[str, ...]
    generate: bool
    size: int

    def find(self, name: str) -> Record | None:
        """A response of this connection that is not kept elsewhere."""
        for stream in self.streams:
            record = self.recent.find(self.connection, stream)
            if record is not None and record.object["id"] == name:
                self.size += record.size
                return replace(record, size=record.size)
        return None

    def forget(self, name: str) -> None:
        """The response is gone: a turn that went on from it has failed."""
        for stream in self.streams:
            record = self.recent.find(self.connection, stream)
            if record is not None and record.object["id"] == name:
                self.recent.drop(self.connection, stream)

    async def watched(
        self, call: ResponsesCall, composer: Composer, happening: AsyncIterator[Event]
    ) -> AsyncIterator[Event]:
        """What happens; the response is there for the next turn before its end is told."""
        async for told in happening:
            if told["type"] in ("response.completed", "response.incomplete") and not call.stored:
                tokens: dict[str, Any] = composer.response["usage"]
                size = self.size + _TOKEN_BYTES * tokens["output_tokens"]
                self.recent.put(self.connection, self.stream, Record(composer.response, list(call.input), size=size))
            yield told


def turn_of(request: Request) -> Turn | None:
    """The turn that a request is; None of one that came over HTTP."""
    turn: Turn | None = request.scope.get(TURN)
    return turn


def only_prompt(request: GenerationRequest) -> GenerationRequest:
    """What computes a prompt and as little more as can be."""
    return replace(request, sampling=replace(request.sampling, max_tokens=1, min_tokens=0))


async def warmed(composer: Composer, active: ActiveCall) -> AsyncIterator[Event]:
    """What happens where nothing is to be generated: the prompt is computed."""
    yield composer.status("created")
    yield composer.status("in_progress")
    async for _ in active.deltas():
        pass
    composer.count(active.prompt_tokens, active.cached_tokens)
    composer.response["completed_at"] = int(time.time())
    yield composer.status("completed")
