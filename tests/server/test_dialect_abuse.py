"""What broken and hostile clients get from the Anthropic and Ollama dialects, in the shape that each of them reads."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.config import limits
from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import ANSWER, Running, running, until

HELLO = [{"role": "user", "content": "Hello"}]
ASK: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "scripted", "max_tokens": 500, "messages": HELLO},
    "/api/chat": {"model": "scripted", "messages": HELLO, "stream": False},
    "/api/generate": {"model": "scripted", "prompt": "Hello", "stream": False},
}
PATHS = list(ASK)
KINDS = {400: "invalid_request_error", 403: "permission_error", 408: "timeout_error", 413: "request_too_large"}
KINDS |= {415: "invalid_request_error", 404: "not_found_error", 503: "overloaded_error", 500: "api_error"}


def message_of(path: str, status: int, body: bytes | str) -> str:
    """The message of a refusal, which has its dialect's shape and gives nothing away."""
    told = json.loads(body)
    if path.startswith("/api"):
        assert list(told) == ["error"]
        message = told["error"]
    else:
        assert set(told) == {"type", "error", "request_id"}
        assert (told["type"], told["error"]["type"]) == ("error", KINDS[status])
        assert told["request_id"]
        message = told["error"]["message"]
    for secret in ("Traceback", "/work", "/secret", ".py", "Error(", "0x"):
        assert secret not in message
    assert 0 < len(message) <= 600
    return str(message)


def refused(server: Running, path: str, status: int, **sent: Any) -> str:
    answer = httpx.post(server.url + path, **sent)
    assert answer.status_code == status, answer.text
    return message_of(path, status, answer.content)


@pytest.fixture
def own(text: TextPipeline) -> Iterator[Running]:
    """A server of the test's own, which it may stop."""
    with running(text) as server:
        server.runner.hold()
        yield server


@pytest.mark.parametrize("path", [*PATHS, "/api/embed", "/api/show", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": NaN}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "a", "model": "b"}',
        b'{"model": ' + b"9" * 10_000 + b"}",
        b'{"model": "scripted", "max_tokens": 3, "messages": "Hello", "prompt": {}, "input": {}, "name": 1}',
    ],
    ids=range(12),
)
def test_bodies(server: Running, path: str, body: bytes) -> None:
    refused(server, path, 400, content=body, headers={"content-type": "application/json"})
    assert not server.runner.seen


@pytest.mark.parametrize("path", PATHS)
def test_before_the_route(server: Running, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Host" in refused(server, path, 403, json=ASK[path], headers={"host": "evil.example"})
    origin = {"origin": "http://evil.example", "content-type": "text/plain"}
    assert "Content-Type" in refused(server, path, 415, content=b"{}", headers=origin)
    assert "Content-Encoding" in refused(server, path, 415, json={}, headers={"content-encoding": "gzip"})
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 1000)
    assert "larger than" in refused(server, path, 413, json={**ASK[path], "x": "y" * 2000})
    refused(server, path + "/nowhere", 404, json={})
    assert httpx.post(server.url + path, json=ASK[path]).status_code == 200


def hostile(source: random.Random, depth: int = 0) -> Any:
    """A JSON value of the kinds a body is made of, put together at random."""
    words = ["role", "user", "assistant", "tool", "content", "type", "text", "tool_use", "tool_result", "thinking"]
    words += (
        "id",
        "tool_use_id",
        "name",
        "input",
        "messages",
        "system",
        "images",
        "tool_calls",
        "function",
        "arguments",
    )
    pick = source.randrange(8 if depth < 5 else 5)
    if pick < 3:
        return source.choice(words)
    if pick < 5:
        return source.choice([None, True, -1, 0, 2**70, 1.5, "", "\x00", "🦊"])
    if pick == 5:
        return [hostile(source, depth + 1) for _ in range(source.randrange(4))]
    return {source.choice(words): hostile(source, depth + 1) for _ in range(source.randrange(5))}


@pytest.mark.parametrize("path", PATHS)
def test_bodies_at_random_are_refused_or_answered(server: Running, path: str) -> None:
    """Most are nearly right: one field of a right body, or what lies within a message, is anything."""
    source, seen = random.Random(path), set()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for _ in range(250):
            body = dict(ASK[path])
            name = source.choice([*body, "system", "tools", "tool_choice", "thinking", "options", "format", "stream"])
            if name == "messages" and source.random() < 0.9:
                block = {"type": source.choice(["text", "tool_use", "tool_result", "thinking"]), "text": "x", "id": "a"}
                block[source.choice(["text", "id", "input", "name", "content"])] = hostile(source, 3)
                role = source.choice(["user", "assistant", "system", "tool"])
                body["messages"] = [{"role": role, "content": [block, hostile(source, 4)][: source.randrange(3)]}]
                body["messages"][0][source.choice(["role", "content", "tool_calls", "x"])] = hostile(source, 2)
            else:
                body[name] = hostile(source)
            answer = http.post(path, json=body)
            seen.add(answer.status_code)
            if answer.status_code != 200:
                assert answer.status_code in (400, 404)
                message_of(path, answer.status_code, answer.content)
    assert 400 in seen
    assert 200 in seen
    server.until_idle()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(server: Running, path: str, stream: bool) -> None:
    server.runner.hold()
    cancelled = server.cancelled
    body = json.dumps({**ASK[path], "stream": stream}).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head % (path.encode(), len(body)) + body)
        until(lambda: server.live == 1)
    until(lambda: server.lifecycle.in_flight == 0)
    server.runner.go()
    server.until_idle()
    assert server.cancelled == cancelled + 1


def test_long_waits_are_filled_with_what_clients_pass_over(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SSE_KEEPALIVE_S", 0.05)
    server.runner.hold()
    asked = {**ASK["/v1/messages"], "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=asked) as answer:
        lines, pings = answer.iter_lines(), 0
        while pings < 4:
            pings += next(lines) == "event: ping"
        server.runner.go()
        assert list(lines)[-3:] == ["event: message_stop", 'data: {"type":"message_stop"}', ""]
    server.runner.first_delay = 0.4
    told = httpx.post(f"{server.url}/api/chat", json={**ASK["/api/chat"], "stream": True}).text
    assert all(json.loads(line)["model"] == "scripted" for line in told.splitlines())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_draining_and_aborting(own: Running, path: str, stream: bool) -> None:
    answers: list[httpx.Response] = []
    body = {**ASK[path], "stream": stream}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(own.url + path, json=body, timeout=60)))
    thread.start()
    until(lambda: own.live == 1)
    asyncio.run_coroutine_threadsafe(own.lifecycle.drain(0.1), own.loop).result(60)
    late = httpx.post(own.url + path, json=ASK[path])
    assert late.headers["retry-after"]
    assert "shutting down" in message_of(path, 503, late.content)
    own.call(own.lifecycle.aborted.set)
    thread.join(60)
    last = answers[0].text
    if stream:
        last = last.strip().splitlines()[-1].removeprefix("data: ")
    assert answers[0].status_code == (200 if stream else 503)
    assert "shutting down" in message_of(path, 503, last)
    own.runner.go()
    own.until_idle()


@pytest.mark.parametrize("path", PATHS)
def test_an_unforeseen_error_says_nothing_of_its_cause(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("at /srv/secret.py")

    monkeypatch.setattr(server.client, "submit", fail)
    message = refused(server, path, 500, json=ASK[path])
    assert message == "The server met an unexpected error; its log names this request by its X-Request-Id."
    monkeypatch.undo()
    assert ANSWER in json.dumps(httpx.post(server.url + path, json=ASK[path]).json())
