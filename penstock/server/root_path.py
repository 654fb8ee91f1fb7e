"""The path under which a proxy shows the server, where the proxy leaves it in front of what it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config.errors import ConfigError

_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]{1,100}){1,16}")


def check_root_path(prefix: str) -> None:
    """Raises ConfigError for what is no path of a few plain names."""
    if prefix and not _PATH.fullmatch(prefix):
        allowed = "names with a slash before each and none behind the last, as in /models/chat"
        raise ConfigError(f"--root-path is {prefix!r}; allowed: {allowed}.")


def check_root_of(prefix: str, paths: Iterable[str]) -> None:
    """Raises ConfigError for a prefix that routes of the server itself begin with, as they could not be reached."""
    taken = next((path for path in paths if path.startswith(prefix + "/")), None)
    if taken is not None:
        told = f"the server's own {taken} begins so; leave /v1 and its like out, and name what the proxy adds before it"
        raise ConfigError(f"--root-path is {prefix!r}, but {told}.")


class RootPath:
    """Takes a prefix off the paths that have it; those that a proxy has taken it off already are left alone."""

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"].startswith(self._prefix + "/"):
            raw = scope.get("raw_path", b"").removeprefix(self._prefix.encode())
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix), "raw_path": raw}
        await self._app(scope, receive, send)
