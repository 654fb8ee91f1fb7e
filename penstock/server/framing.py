"""Where requests begin and end: what the parser passes over, and what only bytes that are yet to come would tell it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

import httptools

Fields = Iterable[tuple[bytes, bytes]]
_LINE_BYTES = 4096  # of a chunk's size with its extensions
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;.*)?\r\n", re.DOTALL)
_UPGRADE = re.compile(rb"\nUpgrade:", re.IGNORECASE)
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Refused(Exception):
    """A request that ends its connection."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_start(method: str, version: str) -> None:
    """Refuses what is no request of HTTP/1 to a server: a tunnel, and other versions.

    Raises:
        Refused: 501 or 505.
    """
    if version not in ("1.0", "1.1"):
        message = f"The request is of HTTP/{version}; versions spoken: HTTP/1.0 and HTTP/1.1."
        raise Refused(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, message)
    if method == "CONNECT":
        raise Refused(HTTPStatus.NOT_IMPLEMENTED, "The method CONNECT is not taken: this server is no proxy.")


def check_fields(version: str, fields: Fields) -> None:
    """Refuses transfer codings other than chunked, once (RFC 9112, section 6), and expectations that cannot be met.

    Raises:
        Refused: 400, 417 or 501.
    """
    fields = list(fields)
    given = [value for name, value in fields if name == b"transfer-encoding"]
    codings = [coding.strip(b" \t").lower() for value in given for coding in value.split(b",")]
    if codings and version == "1.0":
        raise Refused(HTTPStatus.BAD_REQUEST, "HTTP/1.0 has no Transfer-Encoding; send a Content-Length.")
    if codings and codings != [b"chunked"]:
        unknown = all(map(_TOKEN.fullmatch, codings)) and set(codings) != {b"chunked"}
        status = HTTPStatus.NOT_IMPLEMENTED if unknown else HTTPStatus.BAD_REQUEST
        raise Refused(status, 'The only Transfer-Encoding taken is "chunked", once; send the body without another.')
    for name, value in fields:
        if name == b"expect" and value.strip(b" \t").lower() != b"100-continue":
            raise Refused(HTTPStatus.EXPECTATION_FAILED, 'The only Expect taken is "100-continue"; leave it out.')


def authority_of(target: bytes) -> bytes | None:
    """Whom a target in absolute form names, which counts instead of the Host header; None for other forms.

    Raises:
        Refused: it is no target that a server has.
    """
    if b"#" in target:
        raise Refused(HTTPStatus.BAD_REQUEST, "The request's target has a fragment; leave it out.")
    if target.startswith(b"/") or target == b"*":
        return None
    parts = httptools.parse_url(target)
    if parts.schema not in (b"http", b"https") or not parts.host or parts.userinfo:
        raise Refused(HTTPStatus.BAD_REQUEST, "The request's target is neither a path nor a URL of this server.")
    return target.split(b"//", 1)[1].split(b"/", 1)[0].split(b"?", 1)[0]


class WithoutUpgrade:
    """Gives the field Upgrade of heads another name of the same length.

    The parser ends HTTP at it, and would take the request's body for what follows the request; but a server may ignore
    the field (RFC 9110, section 7.8). A head may come in pieces: what may be the field's beginning is held back.
    """

    NAME: Final = b"ignored"
    """The other name, as the parser tells it."""

    def __init__(self) -> None:
        self._held = b""

    def take(self, piece: bytes, last: bool) -> bytes:
        """What to hand on when `piece` comes, which ends the head if it is the last one."""
        text = _UPGRADE.sub(b"\nIgnored:", self._held + piece)
        line = text.rfind(b"\n", max(0, len(text) - len(b"\nUpgrade")))
        cut = line if not last and line >= 0 and b"\nupgrade".startswith(text[line:].lower()) else len(text)
        self._held = text[cut:]
        return text[:cut]


class Chunks:
    """Follows a chunked body beside the parser, which does not tell how long a chunk will be.

    Attributes:
        announced: bytes of all chunks so far, those included that have not come.
        complete: the body is over.
    """

    def __init__(self) -> None:
        self.announced, self.complete = 0, False
        self._left = 0
        self._trailers = False
        self._line = b""

    def take(self, data: bytes | bytearray, start: int) -> int:
        """Where the body ends in data that goes on with it at `start`; the length of the data if it does not.

        Raises:
            Refused: 400, a chunk's size is none, or with what follows it too long.
        """
        while start < len(data) and not self.complete:
            if self._left:
                step = min(self._left, len(data) - start)
                self._left, start = self._left - step, start + step
                continue
            end = data.find(b"\n", start, start + _LINE_BYTES) + 1 or min(len(data), start + _LINE_BYTES)
            self._line += data[start:end]
            start = end
            if self._line.endswith(b"\n"):
                line, self._line = self._line, b""
                self._end_line(line)
            elif len(self._line) >= _LINE_BYTES:
                raise Refused(HTTPStatus.BAD_REQUEST, "A chunk's extensions, or a trailer, are too long.")
        return start

    def _end_line(self, line: bytes) -> None:
        if self._trailers:
            self.complete = line == b"\r\n"
            return
        size = _SIZE.fullmatch(line)
        if size is None:
            raise Refused(HTTPStatus.BAD_REQUEST, "A chunk of the body has no size.")
        length = int(size[1], 16)
        self.announced += length
        self._left, self._trailers = (length + 2, False) if length else (0, True)


def body_length(fields: Fields) -> int:
    """The Content-Length, which the parser has found to be a number; 0 without one."""
    return next((int(value) for name, value in fields if name == b"content-length"), 0)
