"""How commands speak to a running server, of any make that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from penstock.config.environment import read_environment
from penstock.config.errors import ConfigError, EngineDeadError, RequestError, format_value

if TYPE_CHECKING:
    import httpx2

URL = Annotated[str, typer.Option("--url", help="Of the running server.")]
DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_S, _WAIT_S = 10.0, 600.0
_LONGEST_LINE: Final = 16 << 20
PATIENCE_S: Final = 300.0  # with a server that starts, loads or has too much to do
_BUSY: Final = (429, 503)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 30.0
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
        self.url = parts.geturl().rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._proxied = parts.hostname not in ("127.0.0.1", "localhost", "::1")

    def get(self, path: str) -> Any:
        """The JSON at a path; raises as `request`."""
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of an answer.

        Raises:
            EngineDeadError: no server answers there.
            RequestError: it refuses; the message is its own.
        """
        import httpx2

        try:
            with httpx2.Client(**self._settings()) as client:
                response = client.request(method, self.url + path, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._silent(error) from None
        if response.status_code >= 400:
            raise self._refusal(response)
        try:
            return response.json()
        except ValueError as error:
            raise EngineDeadError(f"{self.url} does not answer as such a server does: {error}") from None

    def models(self) -> list[str]:
        """The names of the models that it lists; raises as `request`."""
        found = self.get("/v1/models")
        listed = found.get("data") if isinstance(found, dict) else None
        return [str(entry["id"]) for entry in listed or () if isinstance(entry, dict) and "id" in entry]

    def model(self, name: str | None) -> str:
        """A model's name, if the server lists it; without one, the first that it lists. Raises as `request`.

        Raises:
            ConfigError: there is no such model.
        """
        names = self.models()
        if not names:
            raise ConfigError(f"{self.url} lists no model.")
        if name is not None and name not in names and f"{name}:latest" not in names:
            raise ConfigError(f"{self.url} has no model {name!r}; it has: {', '.join(names[:20])}.")
        return name or names[0]

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream as they come; leaving it ends the request. Raises as `request`."""
        import httpx2

        begun = False
        try:
            async with (
                httpx2.AsyncClient(**self._settings()) as client,
                client.stream("POST", self.url + path, json=body) as response,
            ):
                if response.status_code >= 400:
                    await response.aread()
                    raise self._refusal(response)
                begun = True
                async for event in _events(response):
                    if "error" in event:
                        raise EngineDeadError(_message(event))
                    yield event
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            if not begun:
                raise self._silent(error) from None
            raise EngineDeadError(f"the stream from {self.url} broke off: {error}") from None

    def _settings(self) -> dict[str, Any]:
        import httpx2

        timeout = httpx2.Timeout(_WAIT_S, connect=_CONNECT_S)
        return {"headers": self._headers, "timeout": timeout, "trust_env": self._proxied}

    def client(self, at_once: int) -> httpx2.AsyncClient:
        """A client for `patiently` that has so many connections and waits as long as answers take."""
        import httpx2

        return httpx2.AsyncClient(
            base_url=self.url,
            headers=self._headers,
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            trust_env=self._proxied,
            limits=httpx2.Limits(max_connections=at_once, max_keepalive_connections=at_once),
        )

    def _refusal(self, response: httpx2.Response) -> RequestError:
        message = format_value(response.text[:_SHOWN])
        with suppress(ValueError):
            if isinstance(found := response.json(), dict):
                message = _message(found)
        return RequestError(f"{self.url} answers {response.status_code}: {message}")

    def _silent(self, error: Exception) -> EngineDeadError:
        return EngineDeadError(
            f"no server answers at {self.url} ({error}); start one with `penstock serve`, or name it with --url."
        )


async def patiently(
    client: httpx2.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None, patience_s: float
) -> httpx2.Response:
    """A server's answer; while it is busy, loads or is away it is asked again, for so many seconds.

    Raises:
        EngineDeadError: no answer came in that time.
    """
    import httpx2

    # As bytes: what no UTF-8 or JSON can say is the server's to refuse.
    sent = None if body is None else json.dumps(body).encode("ascii")
    headers = {} if sent is None else {"Content-Type": "application/json"}
    until, wait = time.monotonic() + patience_s, _FIRST_WAIT_S
    while True:
        failure: Exception | None = None
        try:
            answer = await client.request(method, path, content=sent, headers=headers)
        except httpx2.TransportError as error:
            failure = error
        told = "" if failure is not None else answer.headers.get("retry-after", "")
        pause = min(_LONGEST_WAIT_S, float(told)) if told.isascii() and told.isdigit() else wait
        pause, wait = max(pause, wait), min(2 * wait, _LONGEST_WAIT_S)
        over = time.monotonic() + pause > until
        if failure is None and (answer.status_code not in _BUSY or over):
            return answer
        if over:
            raise EngineDeadError(f"no answer came from {path} ({type(failure).__name__}: {failure}).") from None
        await asyncio.sleep(pause)


def ask(url: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """A server's answer to a JSON request. A key is taken from PENSTOCK_API_KEY. Raises as `Server`."""
    keys = read_environment().api_keys
    return Server(url, keys[0] if keys else None).request(method, path, body)


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of server-sent events, up to [DONE].

    Raises:
        ValueError: one is no JSON, or a line is too long.
    """
    rest = bytearray()  # of a line whose end has not come
    async for piece in response.aiter_bytes():
        *ends, begun = piece.split(b"\n")
        for end in ends:
            line, rest = bytes(rest) + end, bytearray()
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data and isinstance(event := json.loads(data), dict):
                yield event
        rest += begun
        if len(rest) > _LONGEST_LINE:
            raise ValueError(f"a line has more than {_LONGEST_LINE} bytes")


def _message(found: Mapping[str, Any]) -> str:
    error = found.get("error", found)
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
