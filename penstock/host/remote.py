"""Models that other servers serve through OpenAI's API: calls are handed on, and answers handed back as they come."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

import httpx2

from penstock.config.environment import key_of
from penstock.config.errors import ConfigError, ModelUnavailableError
from penstock.host.source import ModelSource, RemoteModel

FAILURES_TO_OPEN: Final = 5  # in a row, until calls are refused without asking
OPEN_S: Final = 30.0  # until one call is let through to see
_FIRST_PAUSE_S = 0.2
_AGAIN: Final = frozenset({502, 503, 504})
_BEFORE_IT_ARRIVED = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.RemoteProtocolError)
_CONNECTIONS = 256
_log = logging.getLogger(__name__)


class CircuitBreaker:
    """Keeps calls from a server that has failed several times in a row, until one of them has succeeded again."""

    def __init__(self) -> None:
        self._failures = 0
        self._open_until = 0.0
        self._probing = False

    def wait(self) -> float:
        """Seconds to wait before a call; 0 where it may be made now: then `succeeded` or `failed` has to follow."""
        if self._failures < FAILURES_TO_OPEN:
            return 0.0
        left = self._open_until - time.monotonic()
        if left > 0 or self._probing:
            return max(left, 1.0)
        self._probing = True
        return 0.0

    def succeeded(self) -> None:
        """A call was answered."""
        self._failures, self._probing = 0, False

    def failed(self) -> None:
        """A call was not."""
        self._failures, self._probing = self._failures + 1, False
        self._open_until = time.monotonic() + OPEN_S

    def left(self) -> None:
        """A call was given up by whoever made it, which tells nothing."""
        self._probing = False


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """An answer whose first byte has come.

    Attributes:
        status, media_type: as the other server has them.
        retry_after: what it says of that, if it does.
        body: the bytes, as they come; to be read to its end or closed with `response`.
        response: the connection's.
    """

    status: int
    media_type: str
    retry_after: str | None
    body: AsyncIterator[bytes]
    response: httpx2.Response

    async def aclose(self) -> None:
        """Lets the connection go; safe to call twice."""
        await self.response.aclose()


class RemoteServer:
    """One model's server elsewhere."""

    def __init__(self, source: ModelSource, remote: RemoteModel) -> None:
        """Raises ConfigError where its key is not in the environment."""
        self.name, self.model = source.name, remote.model
        self._remote = remote
        headers = {"accept-encoding": "identity"}
        if remote.key_from is not None:
            key = key_of(remote.key_from)
            if key is None:
                raise ConfigError(f"the key of {source.name} is not there: set the variable {remote.key_from}.")
            headers["authorization"] = f"Bearer {key}"
        timeout = httpx2.Timeout(remote.timeout, connect=remote.connect_timeout)
        limits = httpx2.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=32)
        self._client = httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits)
        self.breaker = CircuitBreaker()

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> RemoteAnswer:
        """Hands a call on; returns when its answer begins. What failed before it arrived is sent again.

        Args:
            path: behind the server's URL, "/chat/completions".
            body: JSON.
            headers: of the call's own.

        Raises:
            ModelUnavailableError: it cannot be reached, gives no answer in time, or has failed too often.
        """
        wait = self.breaker.wait()
        if wait:
            failed = f"where calls failed {FAILURES_TO_OPEN} times in a row"
            message = f"{self.name} is served elsewhere, {failed}; retry later."
            raise ModelUnavailableError(message, retry_after=round(wait), code="remote_failed")
        try:
            response = await self._sent(path, body, headers)
        except httpx2.HTTPError as error:
            self.breaker.failed()
            _log.warning("%s: %s%s: %s: %s", self.name, self._remote.url, path, type(error).__name__, error)
            raise self._unavailable(error) from None
        except BaseException:
            self.breaker.left()
            raise
        if response.status_code in _AGAIN:
            self.breaker.failed()
        else:
            self.breaker.succeeded()
        kind = response.headers.get("content-type", "application/json")
        return RemoteAnswer(
            response.status_code, kind, response.headers.get("retry-after"), response.aiter_raw(), response
        )

    async def _sent(self, path: str, body: bytes, headers: Mapping[str, str]) -> httpx2.Response:
        """The response to the first attempt that was no failure, or to the last."""
        sent = {"content-type": "application/json", **headers}
        for attempt in range(self._remote.retries + 1):
            last = attempt == self._remote.retries
            request = self._client.build_request("POST", f"{self._remote.url}{path}", content=body, headers=sent)
            try:
                response = await self._client.send(request, stream=True)
            except _BEFORE_IT_ARRIVED:
                if last:
                    raise
            else:
                if last or response.status_code not in _AGAIN:
                    return response
                await response.aclose()
            await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")  # the last attempt returns or raises

    def _unavailable(self, error: httpx2.HTTPError) -> ModelUnavailableError:
        if isinstance(error, httpx2.TimeoutException):
            return ModelUnavailableError(
                f"{self.name} is served elsewhere, and no answer began within {self._remote.timeout:g} s; retry later.",
                retry_after=5,
                code="remote_timeout",
            )
        message = f"{self.name} is served elsewhere, and that server cannot be reached; retry later."
        return ModelUnavailableError(message, retry_after=5, code="remote_unreachable")

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._client.aclose()


class RemoteServers:
    """The servers of all models that are served elsewhere, each from its first call on."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[ModelSource, RemoteServer]] = {}

    def of(self, source: ModelSource) -> RemoteServer | None:
        """What hands calls for a model on; None for one that is loaded here.

        Raises:
            ModelUnavailableError: its key is missing.
        """
        if source.remote is None:
            return None
        known = self._known.get(source.name)
        if known is None or known[0] != source:
            try:
                known = self._known[source.name] = (source, RemoteServer(source, source.remote))
            except ConfigError as error:
                raise ModelUnavailableError(f"{source.name} cannot be asked: {error}", code="remote_key") from None
        return known[1]

    async def aclose(self) -> None:
        """Closes all connections."""
        for _, remote in self._known.values():
            await remote.aclose()
