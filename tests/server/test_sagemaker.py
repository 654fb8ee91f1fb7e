"""SageMaker's routes: bodies of the other routes, answered as there."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import ANSWER, Running, running

HELLO = [{"role": "user", "content": "Hello"}]


def invoked(server: Running, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/invocations", json=body, timeout=60)


def test_bodies_are_told_by_their_fields(server: Running) -> None:
    told = invoked(server, {"messages": HELLO}).json()
    assert (told["object"], told["choices"][0]["message"]["content"]) == ("chat.completion", ANSWER)
    assert invoked(server, {"prompt": "Hello"}).json()["object"] == "text_completion"
    assert invoked(server, {"input": "Hello"}).json()["data"][0]["object"] == "embedding"
    assert invoked(server, {"inputs": "Hello"}).json() == [{"generated_text": ANSWER}]
    assert invoked(server, {"query": "a", "documents": ["b"]}).json()["results"][0]["index"] == 0
    assert invoked(server, {"text_1": "a", "text_2": "b"}).json()["data"]


def test_streams(server: Running) -> None:
    with httpx.stream("POST", f"{server.url}/invocations", json={"messages": HELLO, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.read().endswith(b"data: [DONE]\n\n")
    server.until_idle()


def test_refusals_have_the_shape_of_what_was_meant(server: Running) -> None:
    answer = invoked(server, {"messages": HELLO, "temperature": -1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "temperature"
    answer = invoked(server, {"inputs": "Hello", "parameters": {"temperature": 0}})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    answer = invoked(server, {})
    assert answer.status_code == 400 and "messages (/v1/chat/completions)" in answer.json()["error"]["message"]
    assert httpx.post(f"{server.url}/invocations", content=b"{").status_code == 400


@pytest.mark.parametrize("draining", [False, True])
def test_ping(text: TextPipeline, draining: bool) -> None:
    with running(text) as server:
        if draining:
            server.wait(server.lifecycle.drain(1.0))
        assert httpx.get(f"{server.url}/ping").status_code == (503 if draining else 200)
