"""Asks a running server, of any make that speaks OpenAI's API, and reads its streams. Only the standard library."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from penstock.config.errors import ConfigError, EngineDeadError, RequestError, format_value

_CONNECT_S, _WAIT_S = 10.0, 600.0
_LONGEST_LINE: Final = 16 << 20
_SHOWN = 300  # characters of an answer that is no JSON


class Server:
    """A server by its URL, with or without /v1.

    >>> Server("http://127.0.0.1:8000").get("/v1/models")["data"][0]["id"]
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """
        Raises:
            ConfigError: it is no http or https URL.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}; allowed: for example http://127.0.0.1:8000.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._parts = parts
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """The JSON at a path; raises as `post`."""
        return self._whole("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that a body is answered with.

        Raises:
            EngineDeadError: no server answers there.
            RequestError: it refuses; the message is its own.
        """
        return self._whole("POST", path, body)

    def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        connection, response = self._ask(method, path, body)
        try:
            return json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EngineDeadError(f"{self.url} does not answer as such a server does: {error}") from None
        finally:
            connection.close()

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream as they come; leaving it ends the request. Raises as `post`."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()
        connection, response = await asyncio.to_thread(self._ask, "POST", path, body)

        def read() -> None:
            last: Exception | None = None
            try:
                for event in _events(response):
                    loop.call_soon_threadsafe(events.put_nowait, event)
            except (OSError, ValueError, http.client.HTTPException) as error:
                last = EngineDeadError(f"the stream from {self.url} broke off: {error}")
            with suppress(RuntimeError):  # the loop has gone, and with it who asked
                loop.call_soon_threadsafe(events.put_nowait, last)

        thread = threading.Thread(target=read, name="penstock-stream", daemon=True)
        thread.start()
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                if "error" in event:
                    raise EngineDeadError(_message(event))
                yield event
        finally:
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(2)
            connection.close()

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=_CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(_WAIT_S)
            sent = None if body is None else json.dumps(body).encode()
            connection.request(method, self._root + path, sent, self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise RequestError(_refusal(response.status, response.read(_LONGEST_LINE)))
        except (OSError, ValueError, http.client.HTTPException) as error:
            connection.close()
            raise EngineDeadError(
                f"no server answers at {self.url} ({error}); start one with `penstock serve`, or name it with --url."
            ) from None
        except RequestError:
            connection.close()
            raise
        return connection, response


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline(_LONGEST_LINE):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event


def _refusal(status: int, body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    with suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return _message(found)
    return f"the server answers {status}: {format_value(text[:_SHOWN])}"


def _message(found: Mapping[str, Any]) -> str:
    error = found.get("error", found)
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
