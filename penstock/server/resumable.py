"""Streams that go on when their client has left, so that it can come back for the rest, as llama-server's do.

A POST with the header `X-Conversation-Id` whose answer is a stream of events is kept under that name, byte for byte.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config import limits
from penstock.server.active_call import send_within
from penstock.server.auth import OWNER
from penstock.server.connected import cancel_all
from penstock.server.middleware import COMPUTING

HEADER: Final = "x-conversation-id"
_STREAM: Final = b"text/event-stream"


class ResumableStream:
    """One answer as it is told, of which the newest bytes are kept.

    Attributes:
        name: of its conversation.
        total: bytes that have come.
        dropped: bytes at its beginning that are kept no longer.
        began, ended: seconds since the epoch; it has not ended at 0.
        gone: set when nobody is to wait for it any more, which ends it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.total = self.dropped = 0
        self.began, self.ended = int(time.time()), 0
        self.gone = asyncio.Event()
        self._pieces: deque[bytes] = deque()
        self._gone_pieces = 0
        self._news = asyncio.Event()

    @property
    def held(self) -> int:
        """Bytes that are kept."""
        return self.total - self.dropped

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.total += len(piece)
        self._wake()

    def drop_oldest(self) -> int:
        """Gives up a piece; returns its bytes."""
        size = len(self._pieces.popleft())
        self.dropped += size
        self._gone_pieces += 1
        return size

    def end(self) -> None:
        self.ended = self.ended or int(time.time())
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """The bytes from number `start`, those to come included; ends early where they are kept no longer."""
        at, number = self.dropped, self._gone_pieces
        while at + len(piece := self._piece(number)) <= start and piece:
            at, number = at + len(piece), number + 1
        while number >= self._gone_pieces:
            if piece := self._piece(number):
                yield piece[max(0, start - at) :]
                at, number = at + len(piece), number + 1
            elif self.ended:
                return
            else:
                await self._news.wait()

    def _piece(self, number: int) -> bytes:
        """The piece of a number, none of which is empty; nothing where it is yet to come."""
        place = number - self._gone_pieces
        return self._pieces[place] if place < len(self._pieces) else b""


class ResumableStreams:
    """Those that run and those that have ended lately, by owner and name; bounded in number and size."""

    def __init__(self) -> None:
        self._streams: OrderedDict[tuple[str, str], ResumableStream] = OrderedDict()
        self._held = 0

    def find(self, owner: str, name: str) -> ResumableStream | None:
        self._forget_old()
        return self._streams.get((owner, name))

    def named(self, owner: str, names: list[str]) -> list[ResumableStream]:
        """Those of these names, and of names that go on with "::" and a model's behind one of them."""
        self._forget_old()
        own = [stream for (whose, _), stream in self._streams.items() if whose == owner]
        wanted = set(names)
        return [stream for stream in own if {stream.name, stream.name.partition("::")[0]} & wanted]

    def begin(self, owner: str, name: str) -> ResumableStream | None:
        """A new one, in whose place another of its name ends; None where as many run as may."""
        self._forget_old()
        self.stop(owner, name)
        running = sum(not stream.ended for stream in self._streams.values())
        if running >= limits.MAX_RESUMABLE_STREAMS:
            return None
        stream = self._streams[owner, name] = ResumableStream(name)
        return stream

    def add(self, stream: ResumableStream, piece: bytes) -> None:
        """Keeps a further piece; ended streams, the oldest first, and then its own beginning make room."""
        if not piece:
            return
        stream.add(piece)
        self._held += len(piece)
        while self._held > limits.MAX_RESUMABLE_BYTES and self._drop_ended():
            pass
        over = self._held > limits.MAX_RESUMABLE_BYTES
        while stream.held > len(piece) and (over or stream.held > limits.MAX_RESUMABLE_STREAM_BYTES):
            self._held -= stream.drop_oldest()
            over = self._held > limits.MAX_RESUMABLE_BYTES

    def stop(self, owner: str, name: str) -> None:
        """Ends one and forgets it."""
        stream = self._streams.pop((owner, name), None)
        if stream is not None:
            self._held -= stream.held
            stream.gone.set()
            stream.end()

    def _forget_old(self) -> None:
        last = time.time() - limits.RESUMABLE_S
        for owner, name in [key for key, stream in self._streams.items() if 0 < stream.ended < last]:
            self.stop(owner, name)

    def _drop_ended(self) -> bool:
        key = next((key for key, stream in self._streams.items() if stream.ended), None)
        if key is not None:
            self.stop(*key)
        return key is not None


class _Run:
    """A request whose answer may outlive its client."""

    def __init__(self, streams: ResumableStreams, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._streams, self._name = streams, name
        self._scope = scope
        self._receive, self._send = receive, send
        self._gone = asyncio.Event()
        self.asked = asyncio.Event()  # the body has come
        self.begun = asyncio.Event()  # the answer is a stream that is kept
        self.stream: ResumableStream | None = None
        self._start: Message | None = None

    async def receive(self) -> Message:
        """The body, then nothing until the client has gone, or the stream is stopped."""
        if not self.asked.is_set():
            message = await self._receive()
            if message["type"] != "http.request" or not message.get("more_body", False):
                self.asked.set()
            return message
        gone = self._gone if self.stream is None else self.stream.gone
        waits = asyncio.ensure_future(gone.wait())
        begins = asyncio.ensure_future(self.begun.wait())
        try:
            await asyncio.wait((waits,) if self.stream else (waits, begins), return_when=asyncio.FIRST_COMPLETED)
            if not gone.is_set() and self.stream is not None:
                await self.stream.gone.wait()
        finally:
            await cancel_all((waits, begins))
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keeps a stream, and sends anything else."""
        if message["type"] == "http.response.start" and _is_stream(message):
            self.stream = self._streams.begin(self._scope.get(OWNER, ""), self._name)
            if self.stream is not None:
                self._start = message
                self.begun.set()
                return
        if self.stream is None:
            await self._send(message)
            return
        self._streams.add(self.stream, message.get("body", b""))
        if not message.get("more_body", False):
            self.stream.end()

    async def tell(self) -> None:
        """Sends the stream as it is kept, from its beginning."""
        await self.begun.wait()
        assert self.stream is not None and self._start is not None
        await self._send(self._start)
        async for piece in self.stream.follow(0):
            await send_within(self._scope, self._send, piece, more=True)
        await send_within(self._scope, self._send, b"", more=False)

    async def left(self) -> None:
        """Waits until the client has left."""
        await self.asked.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def leave(self) -> None:
        """The client has gone: what is no stream ends."""
        self._gone.set()


class ResumableMiddleware:
    """ASGI middleware in front of the one that checks keys, so that a stream is accounted for when it has ended."""

    def __init__(self, app: ASGIApp, *, streams: ResumableStreams) -> None:
        self._app, self._streams = app, streams
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = Headers(scope=scope).get(HEADER, "") if scope["type"] == "http" and scope["method"] == "POST" else ""
        if not name or len(name) > limits.MAX_CONVERSATION_CHARS or scope["path"] not in COMPUTING:
            await self._app(scope, receive, send)
            return
        run = _Run(self._streams, name, scope, receive, send)
        work = asyncio.create_task(self._work(run, scope))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        telling, left = asyncio.ensure_future(run.tell()), asyncio.ensure_future(run.left())
        try:
            await asyncio.wait((work, telling, left), return_when=asyncio.FIRST_COMPLETED)
            if run.stream is not None:
                await asyncio.wait((telling, left), return_when=asyncio.FIRST_COMPLETED)
                return
            run.leave()
            await work
        finally:
            await cancel_all((telling, left))

    async def _work(self, run: _Run, scope: Scope) -> None:
        try:
            await self._app(scope, run.receive, run.send)
        finally:
            if run.stream is not None:
                run.stream.end()


def _is_stream(message: Message) -> bool:
    kinds = (value for name, value in message["headers"] if name.lower() == b"content-type")
    return message["status"] == 200 and any(kind.startswith(_STREAM) for kind in kinds)
