"""Streams that go on when their client has left, as llama-server's clients ask for them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.config import limits
from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.resumable import ResumableStreams
from tests.server.support import ANSWER, Running, running

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
PATH = "/v1/chat/completions"


def text_of(stream: bytes) -> str:
    events = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)


def lookup(server: Running, *names: str, **more: Any) -> list[dict[str, Any]]:
    body = {"conversation_ids": list(names)}
    found: list[dict[str, Any]] = httpx.post(f"{server.url}/v1/streams/lookup", json=body, timeout=60, **more).json()
    return found


def leave_after_the_first_piece(server: Running, name: str, path: str = PATH, **body: Any) -> bytes:
    """What came of a stream before its client left, while the engine waits."""
    server.runner.hold(3)
    headers = {"X-Conversation-Id": name}
    with httpx.stream("POST", f"{server.url}{path}", json=body or CHAT, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        first = next(answer.iter_raw())
        assert server.runner.held.wait(60)
    return first


@pytest.mark.parametrize("path", [PATH, "/chat/completions"])
def test_what_a_client_missed_is_told_when_it_comes_back(server: Running, path: str) -> None:
    first = leave_after_the_first_piece(server, "one", path)
    (found,) = lookup(server, "one", "two")
    assert (found["conversation_id"], found["is_done"], found["completed_at"]) == ("one", False, 0)
    assert found["total_bytes"] >= len(first)
    server.runner.go()
    rest = httpx.get(f"{server.url}/v1/stream", params={"conv_id": "one", "from": len(first)}, timeout=60).content
    assert text_of(first + rest) == ANSWER
    assert rest.endswith(b"data: [DONE]\n\n")
    whole = httpx.get(f"{server.url}/v1/stream", params={"conv_id": "one"}, timeout=60).content
    assert whole == first + rest
    (found,) = lookup(server, "one")
    assert found["is_done"] and found["completed_at"] >= found["started_at"]
    assert found["total_bytes"] == len(whole)
    server.until_idle()


def test_a_client_that_stays_gets_what_any_other_gets(server: Running) -> None:
    plain = httpx.post(f"{server.url}{PATH}", json=CHAT, timeout=60)
    kept = httpx.post(f"{server.url}{PATH}", json=CHAT, headers={"X-Conversation-Id": "stays"}, timeout=60)
    assert text_of(kept.content) == text_of(plain.content) == ANSWER
    assert kept.headers["content-type"] == plain.headers["content-type"]
    whole = httpx.get(f"{server.url}/v1/stream", params={"conv_id": "stays"}, timeout=60).content
    assert whole == kept.content


def test_a_stream_is_ended_by_name(server: Running) -> None:
    before = server.cancelled
    leave_after_the_first_piece(server, "ended")
    assert httpx.delete(f"{server.url}/v1/stream", params={"conv_id": "ended"}).status_code == 204
    server.until_told()
    server.runner.go()
    server.until_idle()
    assert server.cancelled == before + 1
    assert lookup(server, "ended") == []
    assert httpx.get(f"{server.url}/v1/stream", params={"conv_id": "ended"}).status_code == 404
    assert httpx.delete(f"{server.url}/v1/stream", params={"conv_id": "ended"}).status_code == 204
    server.until_idle()


def test_a_further_call_takes_its_place(server: Running) -> None:
    before = server.cancelled
    server.runner.endless = True
    leave_after_the_first_piece(server, "again")
    server.runner.delay = 0.02  # the first runs on until its place is taken
    server.runner.go()
    further = {**CHAT, "max_tokens": 3}
    again = httpx.post(f"{server.url}{PATH}", json=further, headers={"X-Conversation-Id": "again"}, timeout=60)
    assert ANSWER.startswith(text_of(again.content))
    whole = httpx.get(f"{server.url}/v1/stream", params={"conv_id": "again"}, timeout=60).content
    assert whole == again.content
    server.until_idle()
    assert server.cancelled == before + 1


def test_other_answers_end_with_their_client(server: Running) -> None:
    name = "X-Conversation-Id"
    headers, body = {name: "whole"}, {**CHAT, "stream": False}
    assert httpx.post(f"{server.url}{PATH}", json=body, headers=headers, timeout=60).status_code == 200
    assert httpx.post(f"{server.url}{PATH}", json={**CHAT, "top_p": 7}, headers=headers).status_code == 400
    assert lookup(server, "whole") == []
    before = server.cancelled
    server.runner.hold(2)
    whole = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n{name}: whole\r\nContent-Length: {len(whole)}\r\n"
    with server.connect() as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + whole)
        assert server.runner.held.wait(60)
    server.until_told()
    server.runner.go()
    server.until_idle()
    assert server.cancelled == before + 1


def test_each_key_sees_its_own(text: TextPipeline) -> None:
    with running(text, ServerOptions(api_keys=("a", "b"))) as server:
        headers = {"X-Conversation-Id": "mine", "Authorization": "Bearer a"}
        assert httpx.post(f"{server.url}{PATH}", json=CHAT, headers=headers, timeout=60).status_code == 200
        assert len(lookup(server, "mine", headers={"Authorization": "Bearer a"})) == 1
        other = {"Authorization": "Bearer b"}
        assert lookup(server, "mine", headers=other) == []
        asked = {"params": {"conv_id": "mine"}, "headers": other}
        assert httpx.get(f"{server.url}/v1/stream", **asked).status_code == 404  # type: ignore[arg-type]
        httpx.delete(f"{server.url}/v1/stream", **asked)  # type: ignore[arg-type]
        assert len(lookup(server, "mine", headers={"Authorization": "Bearer a"})) == 1


@pytest.mark.parametrize(
    ("query", "status"),
    [({"conv_id": "none"}, 404), ({}, 400), ({"conv_id": ""}, 400), ({"conv_id": "x", "from": "-1"}, 400)],
)
def test_queries_are_checked(server: Running, query: dict[str, str], status: int) -> None:
    answer = httpx.get(f"{server.url}/v1/stream", params=query)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RESUMABLE_STREAM_BYTES", 100)
    monkeypatch.setattr(limits, "MAX_RESUMABLE_BYTES", 150)
    monkeypatch.setattr(limits, "MAX_RESUMABLE_STREAMS", 2)
    streams = ResumableStreams()
    one, two = streams.begin("", "one"), streams.begin("", "two")
    assert one is not None and two is not None
    assert streams.begin("", "three") is None
    for _ in range(12):
        streams.add(one, b"x" * 10)
    assert (one.total, one.dropped, one.held) == (120, 20, 100)
    one.end()
    streams.add(two, b"y" * 60)
    assert streams.find("", "one") is None
    assert two.held == 60
    monkeypatch.setattr(limits, "RESUMABLE_S", -2.0)
    two.end()
    assert streams.find("", "two") is None
