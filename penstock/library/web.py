"""HTTP as the library speaks it: one client, plain refusals, no byte in another form than it was stored in."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx2

from penstock import __version__
from penstock.config.errors import ConfigError, PenstockError
from penstock.config.limits import MAX_ANSWER_BYTES, MAX_REDIRECTS
from penstock.library.pace import hold_to_pace

AGAIN = (408, 425, 429, 500, 502, 503, 504)
_ATTEMPTS = 3  # of short questions; files that are under way are tried longer
_LONGEST_PAUSE_S = 30.0
ANSWER_S: Final = 120.0  # for a whole answer that is no file
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
Pause = Callable[[float], None]
Answer = TypeVar("Answer")


class WebError(PenstockError):
    """A server that refuses, or cannot be reached.

    Attributes:
        status: of its answer; 0 if there was none.
        passing: it may be otherwise in a moment.
        wait: seconds it asked for.
        challenge: what it says of credentials that it wants.
    """

    def __init__(
        self, message: str, status: int = 0, *, passing: bool = False, wait: float = 0.0, challenge: str = ""
    ) -> None:
        super().__init__(message)
        self.challenge = challenge
        self.status = status
        self.passing = passing
        self.wait = wait


@dataclass(frozen=True, slots=True)
class Web:
    """A way to servers. Proxies are those of the environment (HTTPS_PROXY, NO_PROXY).

    Attributes:
        client: of httpx2.
        pause: waits for so many seconds before a further attempt.
    """

    client: httpx2.Client
    pause: Pause = time.sleep

    @contextmanager
    def stream(
        self,
        url: str,
        headers: Mapping[str, str],
        method: str = "GET",
        content: bytes | Iterator[bytes] | None = None,
        redirects: int = MAX_REDIRECTS,
    ) -> Iterator[httpx2.Response]:
        """An answer whose body is yet to be read.

        Redirects are followed here, not by the client, which would read the whole body of each. Credentials do not
        follow to another origin, and a body follows nowhere.

        Raises:
            WebError: no answer, or one that refuses, or leads on more than `redirects` times.
        """
        sent, place = dict(headers), url
        try:
            for _ in range(1 if content is not None else redirects + 1):
                request = self.client.stream(method, place, headers=sent, content=content, follow_redirects=False)
                with request as response:
                    if response.next_request is None:
                        if not response.is_success:
                            raise refusal(response)
                        if content is None and response.headers.get("content-encoding", "identity") != "identity":
                            raise WebError(f"{_place(place)} sent the file in another encoding; it is not taken.")
                        yield response
                        return
                    target = str(response.next_request.url)
                if origin(target) != origin(place):
                    sent = {name: value for name, value in sent.items() if name.lower() != "authorization"}
                place = target
            if content is not None or not redirects:
                raise WebError(f"{_place(url)} leads to {_place(place)}; what is asked there is not sent elsewhere.")
            raise WebError(f"{_place(url)} leads to another address more than {redirects} times.")
        except httpx2.InvalidURL as error:
            raise WebError(f"{_place(url)} is no address: {error}.") from None
        except httpx2.StreamError as error:
            raise WebError(f"{_place(url)} cannot be read: {str(error)[:160]}.") from None
        except httpx2.HTTPError as error:
            raise WebError(_unreached(url, error), passing=True) from None

    def read(
        self, url: str, headers: Mapping[str, str], most: int = MAX_ANSWER_BYTES, redirects: int = MAX_REDIRECTS
    ) -> tuple[bytes, Mapping[str, str]]:
        """A whole answer of at most so many bytes, and its headers; what passes is tried again.

        Raises:
            WebError: as `stream`, or it is longer.
        """

        def once() -> tuple[bytes, Mapping[str, str]]:
            with self.stream(url, headers, redirects=redirects) as response:
                data, began = bytearray(), time.monotonic()
                for piece in response.iter_raw():
                    data += piece
                    if time.monotonic() - began > ANSWER_S:
                        raise WebError(f"{_place(url)} did not finish its answer within {ANSWER_S:g} s.", passing=True)
                    if len(data) > most:
                        raise WebError(f"{_place(url)} answers with more than {most} bytes; that is not read.")
                return bytes(data), response.headers

        return self.again(once)

    def read_json(
        self, url: str, headers: Mapping[str, str], most: int = MAX_ANSWER_BYTES, redirects: int = MAX_REDIRECTS
    ) -> Any:
        """As `read`, from JSON.

        Raises:
            WebError: as `read`, or the answer is not JSON.
        """
        data, _ = self.read(url, headers, most, redirects)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise WebError(f"{_place(url)} answers with something else than JSON.") from None

    def again(self, once: Callable[[], Answer]) -> Answer:
        """What `once` gives; it is called again where it failed for a moment."""
        for attempt in range(_ATTEMPTS):
            try:
                return once()
            except WebError as error:
                if not error.passing or attempt == _ATTEMPTS - 1:
                    raise
                self.pause(max(error.wait, pause_before(attempt)))
        raise AssertionError


@contextmanager
def open_web(pause: Pause = time.sleep) -> Iterator[Web]:
    """A client for as long as it is needed."""
    headers = {"User-Agent": f"penstock/{__version__}", "Accept-Encoding": "identity"}
    timeout = httpx2.Timeout(30.0, connect=10.0)
    try:
        client = httpx2.Client(headers=headers, timeout=timeout)
    except (ValueError, ImportError, httpx2.InvalidURL) as error:
        raise ConfigError(f"a proxy of the environment (HTTPS_PROXY, ALL_PROXY) cannot be used: {error}") from None
    hold_to_pace(client)
    with client:
        yield Web(client, pause)


def origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port: what credentials belong to.

    Raises:
        WebError: it is no address.
    """
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    except ValueError:
        raise WebError(f"{_place(url)} is no address.") from None


def pause_before(attempt: int) -> float:
    """Seconds to wait after so many attempts in vain."""
    return min(_LONGEST_PAUSE_S, 0.5 * 2.0**attempt)


def content_range(response: httpx2.Response) -> tuple[int, int, int | None] | None:
    """First byte, last byte and size of the whole, of an answer with a part; None where it states none."""
    match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", "").strip())
    if response.status_code != 206 or match is None:
        return None
    return int(match[1]), int(match[2]), None if match[3] == "*" else int(match[3])


def refusal(response: httpx2.Response) -> WebError:
    """What a refusing answer says, without what may be secret in its address."""
    status, where = response.status_code, _place(str(response.url))
    wait = response.headers.get("retry-after", "")
    seconds = min(float(wait), _LONGEST_PAUSE_S) if wait.isdecimal() else 0.0
    told = f"{where} answers {status} {response.reason_phrase}".rstrip()
    challenge = response.headers.get("www-authenticate", "")[:1000] if status == 401 else ""
    return WebError(f"{told}.", status, passing=status in AGAIN, wait=seconds, challenge=challenge)


def _place(url: str) -> str:
    """An address without its query, which may hold a signature."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:200]
    except ValueError:
        return "the address"


def _unreached(url: str, error: httpx2.HTTPError) -> str:
    kind = "took too long" if isinstance(error, httpx2.TimeoutException) else "cannot be reached"
    if isinstance(error, (httpx2.RemoteProtocolError, httpx2.ReadError)):
        kind = "broke off"
    said = str(error)[:160]
    return f"{_place(url)} {kind}{f' ({said})' if said else ''}. Without a network, set HF_HUB_OFFLINE=1."
