"""uvicorn's httptools protocol, so that no client leaves unseen and none is taken to have been idle in a pause."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.server.patience import PatientTimer

_READ_BEHIND = 64  # requests that are parsed while the one before them is being answered


class HeldFlow(FlowControl):
    """Does not go on reading while it is held, whoever asks for it."""

    held = False

    def hold(self, held: bool) -> None:
        if held == self.held:
            return
        self.held = held
        if held:
            self.pause_reading()
        else:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class WatchingProtocol(HttpToolsProtocol):
    """One connection.

    uvicorn tells only the newest request of a connection that its client has gone, and stops reading, so that it would
    not notice, once another request waits behind the one being answered. Here the one being answered is told too, and
    reading goes on until `hold` ends it; whoever parses must stop while the connection is `crowded`.
    """

    flow: HeldFlow

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = HeldFlow(transport)

    @property
    def crowded(self) -> bool:
        """Whether as many requests wait behind the one being answered as are parsed ahead."""
        return len(self.pipeline) >= _READ_BEHIND

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            idle = PatientTimer(self.loop, self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = idle  # type: ignore[assignment]  # uvicorn only cancels it

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, _unchunked(cycle, app) if cycle.scope["http_version"] == "1.0" else app)


def _unchunked(cycle: RequestResponseCycle, app: Any) -> Any:
    """The app for a client of HTTP/1.0, which knows no chunks: a body of unknown length ends as the connection does."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        counted = False

        async def write(message: Message) -> None:
            nonlocal counted
            if message["type"] == "http.response.start":
                counted = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if counted else False
            elif not counted:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, write)

    return run
