"""Headers that make no sense: each is a refusal in words, whatever they hold."""

from __future__ import annotations

import httpx2
import pytest

from penstock.library.transfer import probe
from penstock.library.web import Web, WebError

URL = "https://h.example/x"


def asked(status: int, name: str, value: bytes) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, headers=[(name.encode(), value)], stream=httpx2.ByteStream(b""))

    probe(Web(httpx2.Client(transport=httpx2.MockTransport(answer)), lambda seconds: None), URL, {})


@pytest.mark.parametrize(
    ("status", "name", "value"),
    [
        (206, "Content-Range", b"bytes 0-0/" + b"9" * 5000),
        (206, "Content-Range", b"bytes 0-0/" + b"9" * 18),
        (200, "Content-Length", b"9" * 5000),
        (200, "Content-Length", "\u00b2".encode("latin-1")),
        (503, "Retry-After", "\u00b2".encode("latin-1")),
        (503, "Retry-After", b"9" * 5000),
        (302, "Location", b"http://[bad"),
        (302, "Location", b"https://h.example:99999999/"),
        (302, "Location", b"ftp://h.example/"),
        (302, "Location", b"\xff\xfe://"),
        (304, "ETag", b"x"),
    ],
)
def test_headers_that_make_no_sense_are_refused(status: int, name: str, value: bytes) -> None:
    with pytest.raises(WebError):
        asked(status, name, value)


def test_an_answer_that_was_read_before_is_refused() -> None:
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, content=b"{}"))
    with pytest.raises(WebError, match="cannot be read"):
        Web(httpx2.Client(transport=transport), lambda seconds: None).read(URL, {})
