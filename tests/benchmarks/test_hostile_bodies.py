"""A small, fixed part of the flood of odd requests: every one is answered, and none with a failure of the server."""

from __future__ import annotations

import http.client
from collections import Counter
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

import httpx
import pytest

from benchmarks.hostile import HOLDING, Asked, Stranger
from benchmarks.hostile_bodies import Client, is_error_of, slope
from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import Running, running

COUNT = 1500


def path_of(asked: Asked) -> str:
    return unquote(urlsplit(asked.target).path)


@pytest.fixture(scope="module")
def visited() -> Iterator[Running]:
    with running(TextPipeline.load("penstock-concierge")) as server:
        yield server


def test_the_same_number_is_the_same_request(visited: Running) -> None:
    document = httpx.get(f"{visited.url}/openapi.json").json()
    one, other = Stranger(document, "scripted", 7), Stranger(document, "scripted", 7)
    assert [one.request(number) for number in range(50)] == [other.request(number) for number in range(50)]
    assert Stranger(document, "scripted", 8).request(0) != one.request(0)


def test_odd_requests_are_answered(visited: Running) -> None:
    document = httpx.get(f"{visited.url}/openapi.json").json()
    stranger, client = Stranger(document, "scripted", 3, most_bytes=300_000), Client(visited.url)
    seen: Counter[int] = Counter()
    routes: set[str] = set()
    held = 0
    for number in range(COUNT):
        asked = stranger.request(number)
        routes.add(asked.target.partition("?")[0])
        status, told = client.ask(asked)
        seen[status] += 1
        held += path_of(asked) in HOLDING and status == 200
        assert status and (status < 500 or status == http.client.NOT_IMPLEMENTED), (number, status, asked)
        assert status < 400 or is_error_of(path_of(asked), asked.method, told), (number, status, asked, told)
    client.close()
    assert {200, 400, 404, 415, 501} <= seen.keys()
    assert len(routes) > 40 and held
    visited.until_idle()
    assert httpx.get(f"{visited.url}/livez").status_code == 200


def test_growth_is_told_by_the_minute() -> None:
    assert slope([(float(at), 2**20 * (100 + at)) for at in range(60)]) == pytest.approx(60.0)
    assert slope([(float(at), 2**20) for at in range(60)]) == pytest.approx(0.0)
