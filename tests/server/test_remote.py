"""Models that another server serves: asked under their names there, answered as they come, refused when they fail."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import openai
import pytest

from penstock.engine.text_pipeline import TextPipeline
from penstock.host import remote as remotes
from penstock.host.remote import CircuitBreaker
from penstock.host.source import ModelSource, RemoteModel
from tests.host.support import Engines, source
from tests.server.hosted import Hosting, hosting
from tests.server.support import ANSWER, Running, until

HELLO = [{"role": "user", "content": "Hello!"}]
Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Elsewhere:
    """A server that answers as a test says; remembers what it was asked."""

    url: str
    answer: Answer
    bodies: list[dict[str, object]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def elsewhere(answer: Answer) -> Iterator[Elsewhere]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            server.keys.append(self.headers["authorization"])
            server.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = Elsewhere(f"http://127.0.0.1:{http.server_address[1]}/v1", answer)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def said(status: int, body: bytes = b'{"ok": true}', kind: str = "application/json") -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("content-type", kind)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@contextmanager
def asking(text: TextPipeline, url: str, key_from: str | None = None, **more: Any) -> Iterator[Hosting]:
    engines = Engines(text)
    remote = RemoteModel(url, "theirs", key_from, **more)
    with hosting(engines, ModelSource("ours", remote=remote), source("here")) as server:
        yield server
    until(lambda: not engines.live)


def chat(server: Hosting, model: str = "ours", **more: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={"model": model, "messages": HELLO, **more}, timeout=60)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes, "_FIRST_PAUSE_S", 0.001)


def test_another_penstock_answers(text: TextPipeline, server: Running) -> None:
    remote = ModelSource("ours", remote=RemoteModel(f"{server.url}/v1", "scripted"))
    engines = Engines(text)
    with hosting(engines, remote, source("here")) as many, openai.OpenAI(base_url=f"{many.url}/v1", api_key="k") as api:
        asked: dict[str, Any] = {"model": "ours", "messages": HELLO, "temperature": 0}
        whole = api.chat.completions.create(**asked)
        pieces = [chunk.choices[0].delta.content or "" for chunk in api.chat.completions.create(**asked, stream=True)]
        assert whole.choices[0].message.content == "".join(pieces) == ANSWER
        assert api.completions.create(model="ours", prompt="Hello", max_tokens=2).usage.completion_tokens == 2
        assert api.chat.completions.create(model="here", messages=HELLO, max_tokens=2).model == "here"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            api.chat.completions.create(model="ours", messages=HELLO, temperature=-1)
        assert {model.id: model.model_extra["state"] for model in api.models.list() if model.model_extra} == {
            "ours": "remote", "here": "ready"
        }  # fmt: skip
    server.until_idle()
    until(lambda: not engines.live)


def test_what_is_sent_and_what_comes_back_is_untouched(text: TextPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "secret")
    odd = b'data: {"x":  1}\n\n: odd\n\ndata: [DONE]\n\n'
    with elsewhere(said(200, odd, "text/event-stream")) as there, asking(text, there.url, "THEIR_KEY") as many:
        answer = httpx.post(
            f"{many.url}/v1/chat/completions",
            json={"model": "ours", "messages": HELLO, "stream": True, "their_own": [1.5, None]},
            headers={"authorization": "Bearer mine"},
        )
        assert answer.content == odd
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert there.bodies == [{"model": "theirs", "messages": HELLO, "stream": True, "their_own": [1.5, None]}]
        assert there.keys == ["Bearer secret"]


def test_errors_come_back_as_they_are(text: TextPipeline) -> None:
    with elsewhere(said(429, b'{"error": {"message": "slow down"}}')) as there, asking(text, there.url) as many:
        answer = chat(many)
        assert (answer.status_code, answer.json()) == (429, {"error": {"message": "slow down"}})
        assert len(there.bodies) == 1


def test_what_failed_before_its_first_byte_is_sent_again(text: TextPipeline) -> None:
    left = [503, 502]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        said(left.pop() if left else 200)(handler)

    with elsewhere(answer) as there, asking(text, there.url, retries=2) as many:
        assert chat(many).json() == {"ok": True}
        assert len(there.bodies) == 3


def test_a_server_that_fails_is_left_alone_for_a_while(text: TextPipeline) -> None:
    with elsewhere(said(503)) as there, asking(text, there.url, retries=0) as many:
        for _ in range(remotes.FAILURES_TO_OPEN):
            assert chat(many).status_code == 503
        asked = len(there.bodies)
        refused = chat(many)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "remote_failed")
        assert 0 < int(refused.headers["retry-after"]) <= remotes.OPEN_S
        assert len(there.bodies) == asked == remotes.FAILURES_TO_OPEN
        assert chat(many, "here", max_tokens=2).status_code == 200


def test_a_breaker_lets_one_call_through_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    breaker = CircuitBreaker()
    for _ in range(remotes.FAILURES_TO_OPEN):
        assert breaker.wait() == 0
        breaker.failed()
    assert breaker.wait() == remotes.OPEN_S
    now += remotes.OPEN_S
    assert breaker.wait() == 0
    assert breaker.wait() > 0  # one is on its way
    breaker.failed()
    assert breaker.wait() == remotes.OPEN_S
    now += remotes.OPEN_S
    assert breaker.wait() == 0
    breaker.left()
    assert breaker.wait() == 0
    breaker.succeeded()
    assert [breaker.wait() for _ in range(3)] == [0, 0, 0]


def test_nobody_there(text: TextPipeline) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with asking(text, url) as many:
        refused = chat(many)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "remote_unreachable")
        assert "127.0.0.1" not in refused.text


def test_no_answer_in_time(text: TextPipeline) -> None:
    done = threading.Event()

    def late(handler: BaseHTTPRequestHandler) -> None:
        done.wait(60)

    with elsewhere(late) as there, asking(text, there.url, timeout=3.0) as many:
        refused = chat(many)
        done.set()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "remote_timeout")
        assert len(there.bodies) == 1  # it may be at work on it: it is not asked again


def test_a_stream_that_is_cut_says_so(text: TextPipeline) -> None:
    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(b"data: {}\n\n")
        handler.wfile.flush()
        handler.close_connection = True

    with elsewhere(cut) as there, asking(text, there.url) as many:
        lines = [line for line in chat(many, stream=True).text.split("\n\n") if line]
        assert lines[0] == "data: {}"
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "remote_lost"


def test_a_key_that_is_not_there(text: TextPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THEIR_KEY", raising=False)
    with asking(text, "http://127.0.0.1:9/v1", "THEIR_KEY") as many:
        refused = chat(many)
        assert refused.status_code == 503
        assert "set the variable THEIR_KEY" in refused.json()["error"]["message"]


def test_other_dialects_say_where_to_ask(text: TextPipeline) -> None:
    with asking(text, "http://127.0.0.1:9/v1") as many:
        for path, body in (("/v1/messages", {"max_tokens": 5}), ("/api/chat", {})):
            refused = httpx.post(f"{many.url}{path}", json={"model": "ours", "messages": HELLO, **body})
            assert refused.status_code == 400
            assert "/v1/chat/completions" in refused.text


def test_who_leaves_is_not_waited_for(text: TextPipeline, server: Running) -> None:
    server.runner.delay = 0.05
    remote = ModelSource("ours", remote=RemoteModel(f"{server.url}/v1", "scripted"))
    with hosting(Engines(text), remote) as many:
        body = {"model": "ours", "messages": HELLO, "stream": True, "max_tokens": 1500, "ignore_eos": True}
        with httpx.stream("POST", f"{many.url}/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())
            assert server.live == 1
        server.until_idle()
