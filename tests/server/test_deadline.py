"""Requests that say how long they are worth waiting for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import Running, running, until
from tests.server.test_overload import PATHS


@pytest.fixture
def slow(text: TextPipeline) -> Iterator[Running]:
    with running(text) as server:
        server.runner.delay = 0.05
        yield server


def ask(server: Running, path: str, timeout: str, header: str = "X-Request-Timeout", **fields: Any) -> httpx.Response:
    body = {**PATHS[path], **fields}
    return httpx.post(server.url + path, json=body, headers={header: timeout}, timeout=60)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_whole_answer_that_comes_too_late_is_ended(slow: Running, path: str) -> None:
    slow.runner.hold()
    answer = ask(slow, path, "0.6")
    assert answer.status_code == 504
    assert "0.6 s" in answer.text and "deadline_exceeded" in answer.text
    slow.runner.go()
    slow.until_idle()
    assert (slow.stats().finished, slow.stats().failed) == (0, 0)


def test_a_stream_that_takes_too_long_ends_with_an_error(slow: Running) -> None:
    answer = ask(slow, "/v1/completions", "2", stream=True, max_tokens=1000, ignore_eos=True)
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert len(events) > 2
    assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
    slow.until_idle()


def test_who_waits_in_vain_is_not_computed(slow: Running) -> None:
    """Sixty-four others have all rows: the engine forgets the one whose time is up before it gets one."""
    body = {"prompt": [[number + 5] for number in range(64)], "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{slow.url}/v1/completions", json=body, timeout=60) as others:
        until(lambda: len(slow.runner.seen) == 64)
        slow.runner.hold()
        answer = ask(slow, "/v1/completions", "300", header="X-Envoy-Expected-Rq-Timeout-Ms", prompt=[4000])
        assert answer.status_code == 504
        others.close()
    slow.runner.go()
    slow.until_idle()
    assert not any(row.prompt_ids == (4000,) for row in slow.runner.seen)


def test_what_comes_in_time_is_what_it_always_was(slow: Running) -> None:
    for stream in (False, True):
        answer = ask(slow, "/v1/completions", "60", stream=stream, max_tokens=3)
        assert answer.status_code == 200
        assert "error" not in answer.text


def test_time_that_is_up_before_the_request_has_come(slow: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = slow.raw(head + b"X-Request-Timeout: 0.3\r\nContent-Length: 100\r\n\r\n{", timeout=60)
    assert answer.startswith(b"HTTP/1.1 504")
    assert b"deadline_exceeded" in answer


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e999", "1" * 1000, "1_0", "1e1", "+5", "0.0"])
def test_what_is_no_time_is_refused(slow: Running, value: str) -> None:
    answer = ask(slow, "/v1/completions", value)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_header")
    assert "x-request-timeout" in answer.json()["error"]["message"]
