"""One turn as a call of its own: a POST to the same application, whose events become messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.types import Message, Scope

from penstock.config.errors import PenstockError
from penstock.server.body import PARSED
from penstock.server.connection import ABORT
from penstock.server.encoding import encode_json
from penstock.server.errors import describe

PATH: Final = "/v1/responses"
_ENVELOPE: Final = ("type", "stream_id", "generate", "stream", "background")
_NOT_ASKED: Final = frozenset((b"origin", b"x-request-id"))
_FAILURES: Final = frozenset(("error", "response.failed"))
_EVENT, _DATA = b"event: ", b"data: "


def body_of(message: dict[str, Any]) -> dict[str, Any]:
    """What is in the body of the POST that a `response.create` stands for."""
    return {**{k: v for k, v in message.items() if k not in _ENVELOPE}, "stream": True}


def error_message(error: BaseException, stream: str = "") -> bytes:
    """The message that tells of an error which is no response's."""
    status, body, headers = describe(error)
    return _error(status, body, headers, stream)


def _error(status: int, body: dict[str, Any], headers: dict[str, str], stream: str) -> bytes:
    told = {**body["error"], **({"headers": headers} if headers else {})}
    message = {"type": "error", "status": status, "error": told}
    return encode_json({**message, "stream_id": stream} if stream else message)


class Exchange:
    """The sending and receiving side of one turn's call.

    Attributes:
        failed: whether the answer was an error, or a response that failed.
    """

    def __init__(
        self,
        message: bytes,
        body: dict[str, Any],
        stream: str,
        gone: asyncio.Event,
        tell: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """`message` is as it came, and counts as the POST's body; what is in that is `body`, read already."""
        self._message, self._body = message, body
        self._stream = stream
        self._gone, self._tell = gone, tell
        self._status, self._kind = 0, ""
        self._headers: dict[str, str] = {}
        self._held = b""  # of an event, or of a body, that is not complete
        self._asked = self.failed = False

    def scope(self, opened: Scope, abort: Callable[[], None]) -> Scope:
        """That of the POST, with the fields that opened the WebSocket."""
        fields = [(k, v) for k, v in opened["headers"] if k not in _NOT_ASKED and not k.startswith(b"sec-websocket")]
        fields += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self._message))]
        fields = [field for field in fields if field[0] not in (b"connection", b"upgrade")]
        same = {name: opened[name] for name in ("asgi", "http_version", "server", "client", "root_path")}
        own = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b""}
        state = {"headers": fields, "scheme": "http", "state": dict(opened.get("state", {}))}
        return {**same, **own, **state, PARSED: self._body, "extensions": {ABORT: {"call": abort}}}

    async def receive(self) -> Message:
        """The body, then nothing until the client has gone."""
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._message, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Tells what is sent as messages of the WebSocket."""
        if message["type"] == "http.response.start":
            headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in message["headers"]}
            self._status, self._kind = message["status"], headers.get("content-type", "").partition(";")[0]
            self._headers = {name: headers[name] for name in ("retry-after", "x-request-id") if name in headers}
            return
        self._held += message.get("body", b"")
        if self._kind == "text/event-stream":
            *events, self._held = self._held.split(b"\n\n")
            for event in events:
                await self._event(event)
        elif not message.get("more_body", False):
            self.failed = True
            await self._tell(_error(self._status, json.loads(self._held), self._headers, self._stream))

    async def _event(self, event: bytes) -> None:
        lines = event.split(b"\n")
        data = next((line[len(_DATA) :] for line in lines if line.startswith(_DATA)), None)
        if data is None:  # a comment
            return
        name = next((line[len(_EVENT) :].decode() for line in lines if line.startswith(_EVENT)), "error")
        if name in _FAILURES:
            self.failed = True
        if self._stream:
            data = b'{"stream_id":%s,%s' % (encode_json(self._stream), data[1:])
        await self._tell(data)

    async def fail(self, error: PenstockError) -> None:
        """Tells of an error that came before the call."""
        self.failed = True
        await self._tell(error_message(error, self._stream))
