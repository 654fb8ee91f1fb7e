"""The one middleware every request passes: request id, Host, API key, body limits, counting, and errors' last stop."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config import limits
from penstock.config.errors import PenstockError
from penstock.server.account import ACCOUNT, RequestAccount
from penstock.server.auth import OWNER, ApiKeys, HostRule
from penstock.server.body import TURN, BodyMemory, limited, most_bytes
from penstock.server.connection import ANNOUNCED
from penstock.server.deadline import timeout_of, until
from penstock.server.early import EARLY, EarlyStream
from penstock.server.errors import REQUEST_ID, ClientGone, HttpError, code_of, error_response, not_ready
from penstock.server.lifecycle import Lifecycle
from penstock.server.metrics import Metrics
from penstock.server.paths import KSERVE_MODEL
from penstock.server.reports import RequestReports
from penstock.server.spoken import Dialect, dialect_of_scope

_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:\-]{{1,{limits.MAX_REQUEST_ID_CHARS}}}")
COMPUTING: Final = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"),
        *("/chat/completions", "/completion", "/completions", "/infill", "/v1/responses/compact"),
        *("/", "/generate", "/generate_stream", "/invocations", "/inference/v1/generate"),
        *("/generative_scoring", "/vertex_generate", "/v1/decisions", "/v1/cache/pins"),
        *("/api/v1/generate", "/api/latest/generate", "/api/extra/generate/stream"),
    )
)
"""Paths whose calls are refused while too much work waits, besides those of KServe's models."""
ANSWER: Final = "penstock.answer"
"""Where the scope of a WebSocket has the application that answers its messages, each as a request."""
_SWITCHING = 101
_KSERVE: Final = frozenset(("infer", "generate", "generate_stream"))
_CLIENT_CLOSED_REQUEST = 499


class RequestMiddleware:
    """ASGI middleware. Nothing behind it is reached without a key, except the paths in `auth.PUBLIC_PATHS`.

    The path that decides is the one the router uses, never one rebuilt from a header.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        hosts: HostRule,
        lifecycle: Lifecycle,
        metrics: Metrics,
        reports: RequestReports,
        check_room: Callable[[str], None],
        processes: int = 1,
    ) -> None:
        """`check_room` raises OverloadedError while too much work waits, for the owner it is given.

        This is one of so many HTTP `processes` of a server.
        """
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._lifecycle = lifecycle
        self._metrics, self._reports = metrics, reports
        self._check_room = check_room
        self._turn = asyncio.Lock()
        self._bodies = BodyMemory(processes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            with self._lifecycle.track() if scope["method"] == "POST" else nullcontext():
                await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._open(scope, receive, send)

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a WebSocket in; whoever speaks on it sends what it is asked through `ANSWER`, as requests."""
        headers, started = Headers(scope=scope), time.monotonic()
        scope[REQUEST_ID], status = uuid.uuid4().hex, _SWITCHING
        try:
            self._hosts.check(scope["http_version"], headers.getlist("host"))
            self._keys.check(scope["path"], headers, "POST")
            if self._lifecycle.draining:
                raise not_ready("The server is shutting down; open the connection to another one.", "shutting_down")
        except PenstockError as error:
            response = error_response(error, {**scope, "method": "GET"})
            status = response.status_code
            await response(scope, receive, send)
        else:
            scope[ANSWER] = self
            await self._app(scope, receive, send)
        finally:
            self._metrics.http(
                scope["path"] if scope["path"] in COMPUTING else "unmatched", "GET", status, time.monotonic() - started
            )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope[ACCOUNT] = account = RequestAccount(request_id, scope["method"], scope["path"])
        scope[REQUEST_ID], scope[TURN] = request_id, self._turn
        own = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
        if dialect_of_scope(scope) is Dialect.ANTHROPIC:
            own.append((b"request-id", request_id.encode()))

        async def tracked(message: Message) -> None:
            if message["type"] == "http.response.start":
                account.status = message["status"]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        scope[EARLY] = early = EarlyStream(scope, tracked)
        try:
            self._hosts.check(scope["http_version"], headers.getlist("host"))
            self._keys.check(scope["path"], headers, scope["method"])
            scope[OWNER] = account.owner = owner = self._keys.owner(headers)
            self._reports.begin(account)
            if scope["method"] == "POST" and _computing(scope["path"]):
                self._check_room(owner)  # before anything is done with it: under overload this is what most calls get
            announced = scope.get("extensions", {}).get(ANNOUNCED, {})
            with self._bodies.request() as grow:
                body = limited(receive, _declared_length(headers), announced, grow, most_bytes(scope))
                await self._app(scope, until(body, timeout_of(headers)), early.send)
        except (ClientGone, ClientDisconnect):  # the second: while the body came in
            account.status = _CLIENT_CLOSED_REQUEST
        except Exception as error:
            if not isinstance(error, PenstockError):
                logging.getLogger("penstock.server").exception("request %s failed", request_id)
            account.error = code_of(error)
            if not account.status:
                await error_response(error, scope)(scope, receive, tracked)
            elif early.unanswered:
                await early.fail(error)
        finally:
            early.close()
            route: Any = scope.get("route")
            account.route = getattr(route, "path", _computing(scope["path"]) or "unmatched")
            account.status = account.status or 500
            account.seconds = time.monotonic() - account.started
            self._metrics.http(account.route, scope["method"], account.status, account.seconds)
            self._reports.end(account, headers)


def _computing(path: str) -> str | None:
    """The route of a path whose calls compute: of KServe's not the path, as clients choose the names in it."""
    if path in COMPUTING:
        return path
    name = path.rpartition("/")[2]
    return f"/v2/models/{KSERVE_MODEL}/{name}" if path.startswith("/v2/models/") and name in _KSERVE else None


def _declared_length(headers: Headers) -> int | None:
    value = headers.get("content-length")
    if value is None:
        return None
    value = value.strip(" \t")
    if not (value.isascii() and value.isdigit()) or len(value) > 20:
        raise HttpError(400, "Content-Length is not a number of bytes.", code="invalid_header")
    return int(value)
