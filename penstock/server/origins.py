"""Which pages may open WebSockets: browsers ask no server before they do, as they do before other calls."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config.errors import format_value
from penstock.server.auth import LOCAL_ORIGINS, NO_ORIGIN
from penstock.server.errors import HttpError, error_response

_LOCAL = re.compile(LOCAL_ORIGINS)


class SocketOrigins:
    """ASGI middleware: a WebSocket is opened for programs, pages of this server, and pages that may call it anyway."""

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str]) -> None:
        """`allowed` is as `check_origins` takes it."""
        self._app, self._allowed = app, tuple(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            headers = Headers(scope=scope)
            origins = headers.getlist("origin")
            if origins and not (len(origins) == 1 and self._takes(origins[0].lower(), headers.get("host", "").lower())):
                message = (
                    f"The page's origin is {format_value(origins[0])}, which may not open a WebSocket here; start the "
                    "server with --allowed-origins to let it in."
                )
                refusal = HttpError(403, message, code="origin_not_allowed")
                await error_response(refusal, {**scope, "method": "GET"})(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _takes(self, origin: str, host: str) -> bool:
        if origin.partition("://")[2] == host != "":
            return True
        if self._allowed == (NO_ORIGIN,):
            return False
        return "*" in self._allowed or origin in self._allowed or _LOCAL.fullmatch(origin) is not None
