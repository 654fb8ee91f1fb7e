"""Requests to the HTTP application from within its process: keys, limits and counting are those of any other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from starlette.types import Message

Header = tuple[bytes, bytes]
_END: Final = object()


@dataclass(slots=True)
class Answer:
    """An answer as it begins; its parts come from `parts`."""

    status: int
    headers: Sequence[Header]
    parts: AsyncIterator[bytes]

    def header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == name), None)

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([part async for part in self.parts])


@dataclass(slots=True)
class Asking:
    """One request; closed before its end it is as if its client had gone."""

    app: Callable[..., Any]
    method: str
    path: str
    headers: Sequence[Header]
    body: bytes = b""
    client: tuple[str, int] | None = None
    _told: asyncio.Queue[Any] = field(default_factory=lambda: asyncio.Queue(maxsize=4))
    _gone: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Future[None] | None = None
    _sent: bool = False

    async def __aenter__(self) -> Answer:
        self._task = asyncio.ensure_future(self._run())
        try:
            first = await self._told.get()
        except BaseException:
            await self.__aexit__()
            raise
        if first is _END:
            await self.__aexit__()
            raise ConnectionError("the request was ended without an answer")
        return Answer(first["status"], first["headers"], self._parts())

    async def __aexit__(self, *_: object) -> None:
        self._gone.set()
        assert self._task is not None
        while not self._task.done():  # what it still says is not read, and must not hold it up
            while not self._told.empty():
                self._told.get_nowait()
            await asyncio.wait([self._task], timeout=0.05)
        if not self._task.cancelled():
            self._task.exception()

    async def _run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": quote(self.path, safe="/%").encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), *self.headers],
            "client": self.client,
            "server": ("localhost", 0),
            "extensions": {},
        }
        try:
            await self.app(scope, self._receive, self._send)
        finally:
            if not self._gone.is_set():
                await self._told.put(_END)

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            raise OSError("the client has gone")
        await self._told.put(message)

    async def _parts(self) -> AsyncIterator[bytes]:
        while (message := await self._told.get()) is not _END:
            if part := message.get("body"):
                yield part
            if not message.get("more_body", False):
                return


async def events(answer: Answer) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of events."""
    rest = b""
    async with aclosing(answer.parts) as parts:  # type: ignore[type-var]
        async for part in parts:
            *lines, rest = (rest + part).split(b"\n\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
