"""Calls for models that other servers serve: handed on under the name a model has there, and answered as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.server.account import account_of
from penstock.server.active_call import event
from penstock.server.body import read_body, translated, whole_body
from penstock.server.connected import cancel_all, disconnected, while_connected
from penstock.server.context import ServerContext
from penstock.server.encoding import encode_json
from penstock.server.errors import REQUEST_ID, describe, not_ready
from penstock.server.metrics import ModelMetrics
from penstock.server.shapes import Exact
from penstock.server.strict_json import parse_json

if TYPE_CHECKING:
    from penstock.host.remote import RemoteAnswer, RemoteServer
    from penstock.server.lifecycle import Lifecycle

_EVENTS = "text/event-stream"


class NamedBody(Exact):
    """Of a body that is handed on only the model's name is looked at."""

    model: str | None = None


async def handed_on(request: Request, context: ServerContext, path: str) -> Response | None:
    """The answer of another server, where that serves the model; None where this one does.

    Args:
        path: behind that server's URL.

    Raises:
        RequestError: the body is no JSON object, or the model cannot be reached.
    """
    host = context.models.host
    if host is None or not host.has_remotes:
        return None
    body = await read_body(request, NamedBody, passing=True)
    if context.models.adapters.meant(body.model, host.names.own) is not None:
        return None
    source = await host.find(body.model, str(request.scope[REQUEST_ID]))
    remote = host.remote(source)
    if remote is None:
        return None
    if context.lifecycle.draining:
        raise not_ready("The server is shutting down; send the request to another one.", "shutting_down")
    raw, began = await whole_body(request), time.monotonic()
    metrics = context.metrics.model(source.name)
    account_of(request).model = source.name
    renamed = await translated(request, lambda: encode_json({**parse_json(raw), "model": remote.model}))
    headers = {"x-request-id": str(request.scope[REQUEST_ID])}
    sending = remote.send(path, renamed, headers)
    answer = await while_connected(sending, request.receive, context.lifecycle)
    metrics.first_token.observe(time.monotonic() - began)
    return HandedOn(answer, remote, context.lifecycle, metrics, began)


class HandedOn(Response):
    """An answer as it comes from another server; given up when the client leaves."""

    def __init__(
        self, answer: RemoteAnswer, remote: RemoteServer, lifecycle: Lifecycle, metrics: ModelMetrics, began: float
    ) -> None:
        headers = {} if answer.retry_after is None else {"Retry-After": answer.retry_after}
        super().__init__(status_code=answer.status, headers=headers, media_type=answer.media_type)
        del self.headers["content-length"]
        self._answer, self._remote = answer, remote
        self._lifecycle = lifecycle
        self._metrics, self._began = metrics, began

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks: tuple[asyncio.Future[Any], ...] = ()
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            write = asyncio.ensure_future(self._write(scope, send))
            left = asyncio.ensure_future(disconnected(receive))
            aborted = asyncio.ensure_future(self._lifecycle.aborted.wait())
            tasks = (write, left, aborted)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if write.done():
                write.result()
        finally:
            await cancel_all(tasks)
            await self._answer.aclose()
            self._metrics.request.observe(time.monotonic() - self._began)

    async def _write(self, scope: Scope, send: Send) -> None:
        async for piece in self._pieces(scope):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self, scope: Scope) -> AsyncIterator[bytes]:
        """The bytes; where they end too early a stream of events says so, and any other connection breaks."""
        try:
            async for piece in self._answer.body:
                yield piece
        except Exception:
            self._remote.breaker.failed()
            if not self._answer.media_type.startswith(_EVENTS):
                raise
            lost = not_ready(f"{self._remote.name} is served elsewhere, and the connection was lost.", "remote_lost")
            yield event(describe(lost, scope)[1])
