"""Clients that leave: seen at once, whatever they sent before, and counted as what they were."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.core.protocol import StepResult
from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import Running, running, until
from tests.server.test_metrics import scrape, value

ENDLESS = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def post(**fields: Any) -> bytes:
    body = json.dumps({**ENDLESS, **fields}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )


@pytest.fixture
def own(text: TextPipeline) -> Iterator[Running]:
    with running(text) as server:
        yield server


class Stepping:
    """Holds each step of a server's runner until it is let go."""

    def __init__(self, server: Running) -> None:
        self.taken = 0
        self._go = threading.Semaphore(0)
        self._waits = threading.Event()
        self._free = False
        sample: Any = server.runner.sample

        def held(step: int) -> StepResult:
            if not self._free:
                self._waits.set()
                self._go.acquire()
            self.taken += 1
            result: StepResult = sample(step)
            return result

        server.runner.sample = held  # type: ignore[method-assign]

    def one(self) -> None:
        """Lets the step that waits go, and returns when the next one waits or nothing is left to do."""
        self._waits.clear()
        self._go.release()

    def until_held(self) -> None:
        assert self._waits.wait(60)

    def free(self) -> None:
        self._free = True
        self._go.release(1000)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_seen_within_one_step(own: Running, stream: bool) -> None:
    """Ten requests run and ten wait for a row; the step in flight is the last one that any of them is in."""
    steps = Stepping(own)
    connections = [own.connect() for _ in range(20)]
    for number, connection in enumerate(connections):
        connection.sendall(post(stream=stream, prompt=[number + 5]))
    steps.until_held()
    for _ in range(3):
        steps.one()
        steps.until_held()
    until(lambda: len(own.client._streams) == 20)
    for connection in connections:
        connection.close()
    until(lambda: own.lifecycle.in_flight == 0)  # which ends when the engine was told
    taken, before = steps.taken, own.engine.scheduler.ledger.counters.generated_tokens
    steps.one()
    until(lambda: own.live == 0)
    steps.free()
    own.until_idle()
    assert steps.taken == taken + 1
    assert own.engine.scheduler.ledger.counters.generated_tokens - before <= 20
    stats = own.stats()
    assert (stats.cancelled, stats.finished, stats.failed) == (20, 0, 0)
    found = scrape(own)
    assert value(found, "penstock_requests_finished_total", finished_reason="cancelled") == 20
    route = {"route": "/v1/completions", "method": "POST"}
    assert value(found, "penstock_http_requests_total", **route, status="499") == 20


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_behind_a_second_request(own: Running, stream: bool) -> None:
    """A client that has sent one more request on the connection is missed as any other."""
    own.runner.hold(3)
    with own.connect() as connection:
        connection.sendall(post(stream=stream))
        assert own.runner.held.wait(60)
        connection.sendall(post(stream=stream))
        if stream:
            connection.recv(100)
    until(lambda: own.lifecycle.in_flight == 0)
    own.runner.go()
    own.until_idle()
    assert (own.stats().cancelled, own.stats().finished) == (1, 0)


def test_leaving_while_nothing_can_be_sent(own: Running) -> None:
    """The buffers to a client that does not read are full; that it then leaves is seen all the same."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", own.port))
        connection.sendall(post(n=16, logprobs=20, max_tokens=2000))
        until(lambda: len(own.runner.seen) == 1)
        own.until_idle()  # computed to its end: what was not sent lies in memory, within bounds
        assert own.lifecycle.in_flight == 1
    until(lambda: own.lifecycle.in_flight == 0)


def test_who_was_answered_is_not_counted_as_gone(own: Running) -> None:
    for number in range(50):
        with httpx.stream("POST", f"{own.url}/v1/completions", json={"prompt": [number + 5], "stream": True}) as answer:
            list(answer.iter_bytes())
    until(lambda: own.lifecycle.in_flight == 0)
    stats, found = own.stats(), scrape(own)
    assert (stats.cancelled, stats.finished) == (0, 50)
    assert value(found, "penstock_requests_finished_total", finished_reason="stop") == 50
    route = {"route": "/v1/completions", "method": "POST"}
    assert value(found, "penstock_http_requests_total", **route, status="200") == 50
    assert value(found, "penstock_http_requests_total", **route, status="499") == 0
