"""Errors nobody foresaw, and what the log holds of requests."""

from __future__ import annotations

import logging

import httpx
import pytest

from penstock.config.errors import EngineDeadError, OverloadedError, TemplateError, format_value
from penstock.server.encoding import encode_json
from penstock.server.errors import describe
from penstock.text.detokenizer import IncrementalDetokenizer
from tests.server.support import Running, until

MARKER = "the-clients-own-words"


def fail(*_: object) -> None:
    raise RuntimeError(f"at /srv/secret.py: {MARKER}0x7f00")


@pytest.mark.parametrize("stream", [False, True])
def test_an_unforeseen_error_says_nothing_of_its_cause(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    monkeypatch.setattr(server.client, "submit", fail)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello", "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    for secret in ("RuntimeError", "/srv", "0x7f", "Traceback"):
        assert secret not in answer.text
    assert answer.headers["x-request-id"] in caplog.text
    monkeypatch.undo()
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello"}).status_code == 200


def test_an_unforeseen_error_within_a_stream_is_its_last_event(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(IncrementalDetokenizer, "push", fail)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello", "stream": True})
    assert answer.status_code == 200
    assert answer.text.endswith('"code":"internal_error"}}\n\n')
    assert "RuntimeError" not in answer.text
    assert "a stream failed" in caplog.text


def test_what_clients_say_is_not_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("penstock").setLevel(logging.DEBUG)
    for path, body in (
        ("/v1/completions", {"prompt": MARKER}),
        ("/v1/completions", {"prompt": MARKER, "stream": True}),
        ("/v1/completions", {"prompt": MARKER, "temperature": MARKER}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARKER}]}),
        ("/tokenize", {"prompt": MARKER}),
        (f"/{MARKER}", {}),
    ):
        httpx.post(f"{server.url}{path}", json=body, headers={"X-Api-Key": MARKER})
    messages = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not any(MARKER in message for message in messages)


def test_leavers_are_counted_as_cancelled(server: Running) -> None:
    def cancelled() -> float:
        name = 'vllm:request_success_total{finished_reason="cancelled"'
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    server.runner.delay, before = 0.05, cancelled()
    body = {"prompt": "Hello", "stream": True, "n": 3, "ignore_eos": True, "max_tokens": 2000}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    until(lambda: cancelled() == before + 3)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (TemplateError("roles must alternate"), 400, "invalid_request_error"),
        (EngineDeadError("gone: /tmp/socket"), 503, "service_unavailable"),
        (OverloadedError("full", retry_after=7), 429, "rate_limit_error"),
        (MemoryError("x"), 500, "server_error"),
    ],
)
def test_kinds_of_errors(error: Exception, status: int, kind: str) -> None:
    found, body, headers = describe(error)
    assert (found, body["error"]["type"]) == (status, kind)
    assert "/tmp" not in body["error"]["message"]
    assert ("Retry-After" in headers) == (status in (429, 503))


def test_values_are_shown_short() -> None:
    for value in ("x" * 10**6, [["y" * 100] * 100] * 100, {str(i): i for i in range(1000)}, 10**4000, b"z" * 10**5):
        assert len(format_value(value)) <= 80


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (-1.5, "-1.5"),
        ("short", '"short"'),
        ('it\'s "é"\n\u202e\ud800', '"it\'s \\"é\\"\\n\\u202e\\ud800"'),
        ({"a": [False, None], "b": {}}, '{"a": [false, null], "b": {}}'),
        ([], "[]"),
        ((1, "x"), '[1, "x"]'),
        ([[[[1]]]], "[[[...]]]"),
        ({str(i): i for i in range(9)}, '{"0": 0, "1": 1, "2": 2, ...}'),
    ],
)
def test_values_are_shown_as_json_has_them(value: object, text: str) -> None:
    assert format_value(value) == text


def test_text_utf8_cannot_carry_does_not_fail_an_answer() -> None:
    assert encode_json({"a": "\ud800"}) == b'{"a":"?"}'
    assert encode_json({"a": "é"}) == '{"a":"é"}'.encode()
