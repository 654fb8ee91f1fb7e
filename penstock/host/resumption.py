"""Requests of an engine that died go on in the one started in its place; one that engines die of does not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Set
from typing import Final, NamedTuple

from penstock.core.request import EngineRequest, FinishReason
from penstock.engine.streams import OutputStream, StreamTable

TRIAL_TOKENS: Final = 3  # of each sequence: an engine may have been some steps ahead of what it told
MOST_DEATHS: Final = 6
_ENDED: Final = 256  # requests that are not forgotten at once when they end
MOST_UNSEEN: Final = 3  # deaths of engines that had been sent a request, and had not begun it as far as is known
ENDED_ENGINES: Final = (
    "The engine stopped unexpectedly, more than once, while it computed this request, which is not tried again. Change "
    "the request, or look into the server's log."
)
CANNOT_GO_ON: Final = "The engine stopped unexpectedly while this request was running. Send the request again."
_log = logging.getLogger(__name__)


class Past(NamedTuple):
    """What is known of the engines that a live request has had: those that worked on it when they died, and those that
    had been sent it and had not begun.
    """

    deaths: int = 0
    unseen: int = 0


Move = Callable[[OutputStream, Past], bool]
"""Has a request go on in another engine that is there; False where there is none."""


class Resumption:
    """Requests between two engines, and those whose turn in the new one has not come.

    Requests that the engine worked on when it died come back one at a time: the next one is sent when the one before
    has ended, or is further than it was. So the one that is on trial is what a second death is blamed on, and nobody
    in its company. Requests that waited, and new ones, come after them.

    Attributes:
        resumed: how many have come back.
        waits: there is an engine, and it is not the turn of these requests: none is sent, new ones neither.
        move: where there are several engines; requests of one that died need not wait for the next then.
    """

    def __init__(self, streams: StreamTable, send: Callable[[OutputStream], None]) -> None:
        """`send` sends a request, and what is known of its answers so far, to the engine."""
        self._streams = streams
        self._send = send
        self._deaths: Counter[str] = Counter()  # of engines that worked on them, by live requests
        self._unseen: Counter[str] = Counter()  # the same of engines that had only been sent them
        self._held: dict[str, OutputStream] = {}  # in the order in which they are sent
        self._tried: OutputStream | None = None
        self._passes_at = 0  # so many tokens of the one on trial
        self.resumed = 0
        self.waits = False
        self.move: Move = lambda stream, past: False

    def holds(self, stream: OutputStream) -> bool:
        """Whether the engine has not been sent this request yet."""
        return _name(stream) in self._held

    @property
    def goes_on(self) -> bool:
        """Whether requests are on their way back."""
        return self.waits or bool(self._held) or self._tried is not None

    def hold(self, stream: OutputStream) -> bool:
        """Holds a new request back, as long as there are others that come back; whether it does."""
        if not self.goes_on:
            return False
        self._held[_name(stream)] = stream
        return True

    def drop(self, stream: OutputStream) -> None:
        """A request that is held back is not wanted any more."""
        del self._held[_name(stream)]

    def adopt(self, stream: OutputStream, past: Past) -> None:
        """A request of another engine goes on here, in its turn among those that come back."""
        name = _name(stream)
        for counts, number in zip((self._deaths, self._unseen), past, strict=True):
            counts.pop(name, None)  # of another request of that name
            if number:
                counts[name] = number
        if len(self._deaths) + len(self._unseen) > 2 * len(self._streams) + _ENDED:
            self._forget_ended()
        self._held[name] = stream
        self.go_on()

    def past(self, stream: OutputStream) -> Past:
        """What is known of engines that died of a request."""
        return Past(self._deaths[_name(stream)], self._unseen[_name(stream)])

    def move_held(self) -> None:
        """Has requests that are held go on in another engine, as far as there is one."""
        for name, stream in [*self._held.items()]:
            if self.move(stream, self.past(stream)):
                del self._held[name]

    def died(self, worked_on: Set[str] | None, *, alone: bool = True) -> None:
        """The engine is gone.

        Args:
            worked_on: requests that it worked on when it died; None where nobody knows which.
            alone: whether none of them was somebody else's, who could be to blame.
        """
        tried, self._tried = self._tried, None
        suspects, others = [], []
        for stream in self._streams.live():
            name = _name(stream)
            if stream.closed or stream.unwanted:  # it may have died before it did as it was told
                self._streams.end(stream, FinishReason.CANCELLED)
            elif needs_its_engine(stream.request):  # which have gone with the engine
                self._streams.end(stream, FinishReason.ERROR, CANNOT_GO_ON)
            elif name in self._held or self._only_waited(name, worked_on):
                others.append(stream)
            elif (stream is tried and worked_on is not None and alone) or self._deaths[name] + 1 >= MOST_DEATHS:
                _log.error("request %s is ended: engines died while they computed it", name)
                self._streams.end(stream, FinishReason.ERROR, ENDED_ENGINES)
            else:
                self._deaths[name] += 1
                suspects.append(stream)
        self._forget_ended()
        self._held = {_name(stream): stream for stream in (*suspects, *others)}
        self.move_held()
        for stream in self._held.values():
            self._streams.wait_again(stream)

    def _forget_ended(self) -> None:
        live = set(map(_name, self._streams.live()))
        self._deaths = Counter({name: self._deaths[name] for name in live & self._deaths.keys()})
        self._unseen = Counter({name: self._unseen[name] for name in live & self._unseen.keys()})

    def _only_waited(self, name: str, worked_on: Set[str] | None) -> bool:
        """Whether an engine that was sent a request died without having begun it, which nobody believes for ever."""
        if worked_on is None or name in worked_on:
            return False
        self._unseen[name] += 1
        return self._unseen[name] < MOST_UNSEEN

    def go_on(self) -> None:
        """Sends what may be sent now: there is an engine, and it may have got further."""
        if self.waits:
            return
        tried = self._tried
        if tried is not None and self._streams.is_live(tried) and not tried.closed and tried.tokens < self._passes_at:
            return
        self._tried = None
        while self._held and self._tried is None:
            name, stream = next(iter(self._held.items()))
            del self._held[name]
            if stream.admitted:
                self.resumed += 1
            if self._deaths[name]:
                self._tried = stream
                self._passes_at = stream.tokens + TRIAL_TOKENS * len(stream.open)
            stream.sent_again()
            self._send(stream)
            if not self._streams.is_live(stream):  # it could not be sent
                self._tried = None


def needs_its_engine(request: EngineRequest) -> bool:
    """Whether it needs what the engine had been given besides the request, so that it cannot go on in another."""
    return request.encoder is not None or any(span.rows is None for span in request.media)


def _name(stream: OutputStream) -> str:
    return stream.request.request_id
