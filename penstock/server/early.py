"""A stream that begins before its answer does: comments tell a client what it waits for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from starlette.types import Message, Scope, Send

from penstock.server.active_call import event
from penstock.server.errors import describe
from penstock.server.spoken import Dialect, dialect_of_scope

EARLY: Final = "penstock.early"
"""Where an ASGI scope has the EarlyStream of its request."""


class EarlyStream:
    """The sending side of a request, and what is to be done when it has been answered.

    Once a comment has been sent the answer is a stream of events: the head of the response that comes later is left
    out, and an error that ends it is sent as an event.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._ends = ExitStack()
        self._begun = self._answered = False

    @property
    def unanswered(self) -> bool:
        """Whether comments have been sent and no answer has begun."""
        return self._begun and not self._answered

    def at_end(self, work: Callable[[], object]) -> None:
        """Has this called when the request has been answered, or has failed."""
        self._ends.callback(work)

    def close(self) -> None:
        """The request has been answered."""
        self._ends.close()

    async def comment(self, text: str) -> None:
        """Sends a line that clients of server-sent events pass over."""
        if not self._begun:
            self._begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            headers.append((b"x-accel-buffering", b"no"))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        line = b": " + text.replace("\n", " ").encode() + b"\n\n"
        await self._send({"type": "http.response.body", "body": line, "more_body": True})

    async def send(self, message: Message) -> None:
        """An ASGI `send` for the answer."""
        begins = message["type"] == "http.response.start"
        self._answered = self._answered or begins
        if not (self._begun and begins):
            await self._send(message)

    async def fail(self, error: BaseException) -> None:
        """Ends a stream that has begun with an error."""
        body = describe(error, self._scope)[1]
        name = "error" if dialect_of_scope(self._scope) is Dialect.ANTHROPIC else ""
        await self._send({"type": "http.response.body", "body": event(body, name), "more_body": False})
