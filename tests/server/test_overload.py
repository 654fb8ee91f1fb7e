"""A server with more to do than it can: who is refused, how fast, with what words."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.middleware import COMPUTING
from penstock.server.paths import KSERVE_MODEL
from tests.server.support import Running, running, until
from tests.server.test_metrics import scrape, value

MANY = {"prompt": [[5, 6, number] for number in range(200)], "max_tokens": 50, "ignore_eos": True}
PATHS = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"input": "Hello", "model": "scripted"},
    "/v1/responses/compact": {"input": "Hello", "model": "scripted"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "model": "scripted"},
    "/api/chat": {"messages": [{"role": "user", "content": "Hello"}], "model": "scripted"},
    "/api/generate": {"prompt": "Hello", "model": "scripted"},
    "/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {}},
    "/generative_scoring": {"query": "Hello", "items": ["you"], "label_token_ids": [5]},
    "/v1/decisions": {"input": "Hello", "questions": [{"type": "predicate", "instructions": "It is a greeting."}]},
    "/v1/cache/pins": {"prompt": "Hello, I need a table for two."},
    "/vertex_generate": {"instances": [{"text": "Hello"}]},
    **{path: {"prompt": "Hello"} for path in ("/completion", "/completions")},
    **{path: {"inputs": "Hello"} for path in ("/", "/generate", "/generate_stream", "/invocations")},
    **{f"/api/{path}": {"prompt": "Hello"} for path in ("v1/generate", "latest/generate", "extra/generate/stream")},
}
KSERVE = {
    "/v2/models/scripted/generate": {"text_input": "Hello"},
    "/v2/models/scripted/versions/1/generate_stream": {"text_input": "Hello"},
    "/v2/models/scripted/infer": {"inputs": []},
}


@pytest.fixture
def busy(text: TextPipeline) -> Iterator[Running]:
    """A server in which seconds of work wait, of which one may: a single call of 200 prompts that came to it idle."""
    with running(text, max_queue_seconds=1.0) as server:
        server.runner.delay = 0.05
        thread = threading.Thread(target=leave_in_the_end, args=(server,))
        thread.start()
        waiting = server.client._streams.waiting
        until(lambda: waiting.requests > 0 and waiting.seconds() > 2)
        server.runner.delay = 0.4  # it waits for longer than any test takes
        yield server
        server.runner.delay = 0.0
        thread.join()


def leave_in_the_end(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=MANY, timeout=60)
    assert len(answer.json()["choices"]) == 200


@pytest.mark.parametrize("path", [*PATHS, *KSERVE])
def test_every_dialect_refuses_at_once(busy: Running, path: str) -> None:
    answer = httpx.post(busy.url + path, json=(PATHS | KSERVE)[path])
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "s of work wait already" in answer.text


def test_refusals_are_counted_under_their_route(busy: Running) -> None:
    for path, body in PATHS.items():
        httpx.post(busy.url + path, json=body)
    for path, body in KSERVE.items():
        httpx.post(busy.url + path, json=body)
    told = scrape(busy)
    for name in ("generate", "generate_stream", "infer"):
        labels = {"route": f"/v2/models/{KSERVE_MODEL}/{name}", "method": "POST", "status": "429"}
        assert value(told, "penstock_http_requests_total", **labels) == 1, name
    for path in PATHS:
        labels = {"route": path, "method": "POST", "status": "429"}
        assert value(told, "penstock_http_requests_total", **labels) == 1, path
    assert set(PATHS) == COMPUTING - {"/infill"}  # whose tokens this vocabulary has not


def test_how_long_the_queue_is_can_be_read(busy: Running) -> None:
    assert value(scrape(busy), "penstock_queue_seconds") > 1
    busy.runner.delay = 0.0
    until(lambda: busy.client._streams.waiting.requests == 0)
    assert value(scrape(busy), "penstock_queue_seconds") == 0


def test_work_in_the_background_is_refused_before_it_begins(busy: Running) -> None:
    answer = httpx.post(f"{busy.url}/v1/responses", json={**PATHS["/v1/responses"], "background": True})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1


def test_clients_know_what_it_means(busy: Running) -> None:
    api = openai.OpenAI(base_url=f"{busy.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError) as refused:
        api.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "Hello"}])
    assert (refused.value.code, refused.value.type) == ("overloaded", "rate_limit_error")
    with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
        anthropic.Anthropic(base_url=busy.url, api_key="none", max_retries=0).messages.create(
            model="scripted", max_tokens=5, messages=[{"role": "user", "content": "Hello"}]
        )


def test_who_is_refused_leaves_nothing_and_there_is_room_again(busy: Running) -> None:
    for _ in range(20):
        assert httpx.post(f"{busy.url}/v1/completions", json=PATHS["/v1/completions"]).status_code == 429
    assert busy.client._streams.waiting._all.arriving == 0
    busy.runner.delay = 0.0
    until(lambda: busy.client._streams.waiting.requests == 0)
    assert httpx.post(f"{busy.url}/v1/completions", json=PATHS["/v1/completions"]).status_code == 200


def test_a_key_with_hundreds_of_requests_does_not_keep_another_waiting(text: TextPipeline) -> None:
    """Its single request is among the next to get a row, not behind the three hundred."""
    with running(text, ServerOptions(api_keys=("one", "other"))) as server:
        server.runner.hold()
        many = {**MANY, "prompt": [[5, 6, number] for number in range(300)], "max_tokens": 20}
        url, keys = f"{server.url}/v1/completions", [{"Authorization": f"Bearer {key}"} for key in ("one", "other")]
        thread = threading.Thread(target=lambda: httpx.post(url, json=many, headers=keys[0], timeout=60))
        thread.start()
        until(lambda: len(server.client._streams) == 300)
        single = threading.Thread(
            target=lambda: httpx.post(url, json={"prompt": [4000], "max_tokens": 3}, headers=keys[1], timeout=60)
        )
        single.start()
        until(lambda: len(server.client._streams) == 301)  # while at most the first 64 are in their first step
        server.runner.go()
        single.join()
        thread.join()
        order = [row.prompt_ids for row in server.runner.seen]
        assert len(order) == 301
        assert order.index((4000,)) < 128


def test_a_keys_backlog_gets_no_other_key_refused(text: TextPipeline) -> None:
    """Seconds of work wait, of which one may, and all of it is of one key: that one is refused, the other served."""
    with running(text, ServerOptions(api_keys=("one", "other")), max_queue_seconds=1.0) as server:
        server.runner.delay = 0.05
        url, keys = f"{server.url}/v1/completions", [{"Authorization": f"Bearer {key}"} for key in ("one", "other")]
        many = {**MANY, "prompt": [[5, 6, number] for number in range(400)]}
        thread = threading.Thread(target=lambda: httpx.post(url, json=many, headers=keys[0], timeout=60))
        thread.start()
        waiting = server.client._streams.waiting
        until(lambda: waiting.requests > 0 and waiting.seconds() > 2)
        status = [
            httpx.post(url, json={"prompt": "Hello", "max_tokens": 1}, headers=key, timeout=60).status_code
            for key in (keys[0], keys[1], keys[0])
        ]
        still = waiting.requests
        server.runner.delay = 0.0
        thread.join()
        assert status == [429, 200, 429] and still > 0


def test_those_who_leave_the_queue_are_not_computed(busy: Running) -> None:
    """Their clients have gone: the engine forgets them before they get a row."""
    seen = len(busy.runner.seen)
    busy.client._streams.waiting._most_seconds = None
    waiting, body = len(busy.client._streams), json.dumps({"prompt": "Hello", "max_tokens": 7}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    connections = [busy.connect() for _ in range(10)]
    for connection in connections:
        connection.sendall(head % len(body) + body)
    until(lambda: len(busy.client._streams) == waiting + 10)
    for connection in connections:
        connection.close()
    until(lambda: busy.stats().cancelled == 10)
    assert not any(row.sampling.max_tokens == 7 for row in busy.runner.seen[seen:])


def test_a_refusal_costs_no_tokenising(busy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes before anything is done with the prompt, so it is as fast for a long one."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the prompt was tokenised")

    monkeypatch.setattr("penstock.engine.frontend.Frontend.tokenize", fail)
    answer = httpx.post(f"{busy.url}/v1/completions", json={"prompt": "word " * 10_000})
    assert answer.status_code == 429
