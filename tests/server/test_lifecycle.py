"""Loading, restarting, draining, aborting; and that nothing of a request is left behind."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import httpx
import pytest

from penstock.engine.api import EngineState
from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import ANSWER, Running, running, serving_in_state, until

ASK = {"prompt": "Hello", "max_tokens": 100}


@pytest.fixture
def own(text: TextPipeline):  # type: ignore[no-untyped-def]
    """A server of the test's own, which it may stop."""
    with running(text) as server:
        server.runner.hold()
        yield server


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (EngineState.STARTING, "not_ready"),
        (EngineState.RESTARTING, "engine_unavailable"),
        (EngineState.STOPPED, "engine_unavailable"),
    ],
)
def test_an_engine_that_is_not_ready(text: TextPipeline, tmp_path: Path, state: EngineState, code: str) -> None:
    with serving_in_state(state, text, tmp_path) as server:
        for path in ("/readyz", "/health"):
            assert httpx.get(server.url + path).status_code == 503
        assert httpx.get(f"{server.url}/livez").status_code == (503 if state is EngineState.STOPPED else 200)
        answer = httpx.post(f"{server.url}/v1/completions", json=ASK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        assert int(answer.headers["retry-after"]) >= 1
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "scripted"
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert server.client.state is state


def drain(server: Running, timeout: float) -> asyncio.Future[bool]:
    return asyncio.run_coroutine_threadsafe(server.lifecycle.drain(timeout), server.loop)  # type: ignore[return-value]


def in_background(server: Running, **fields: object) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []
    ask = {**ASK, **fields}

    def work() -> None:
        answers.append(httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60))

    thread = threading.Thread(target=work)
    thread.start()
    return thread, answers


def test_draining_finishes_what_runs_and_refuses_what_comes(own: Running) -> None:
    work = [in_background(own), in_background(own, stream=True)]
    until(lambda: len(own.client._streams) == 2)
    drained = drain(own, 60)
    until(lambda: own.lifecycle.draining)
    assert httpx.get(f"{own.url}/readyz").json() == {"status": "draining"}
    refused = httpx.post(f"{own.url}/v1/completions", json=ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in refused.headers
    own.runner.go()
    assert drained.result(60) is True  # type: ignore[call-arg]
    for thread, _ in work:
        thread.join()
    (whole,), (stream,) = work[0][1], work[1][1]
    assert whole.json()["choices"][0]["text"] == ANSWER
    assert stream.text.endswith("data: [DONE]\n\n")


def test_draining_an_idle_server_takes_no_time(own: Running) -> None:
    assert drain(own, 3600).result(60) is True  # type: ignore[call-arg]


def test_aborting_ends_streams_with_an_error_event(own: Running) -> None:
    own.runner.delay = 0.05
    own.runner.go()
    long = {"ignore_eos": True, "max_tokens": 2000}
    work = [in_background(own, **long), in_background(own, **long, stream=True)]
    until(lambda: own.live == 2 and min(own.runner.drawn.values()) > 1)  # the stream has begun
    assert drain(own, 0.1).result(60) is False  # type: ignore[call-arg]
    own.call(own.lifecycle.aborted.set)
    for thread, _ in work:
        thread.join(60)
    (whole,), (stream,) = work[0][1], work[1][1]
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "shutting_down")
    last = stream.text.removesuffix("\n\n").rsplit("data: ", 1)[1]
    assert json.loads(last)["error"]["code"] == "shutting_down"
    own.runner.go()
    own.until_idle()


def test_nothing_is_left_of_hundreds_of_requests(server: Running) -> None:
    def tasks() -> int:
        counted = asyncio.run_coroutine_threadsafe(count(), server.loop)
        return counted.result(60)

    async def count() -> int:
        return len(asyncio.all_tasks())

    with httpx.Client(base_url=server.url) as http:
        http.post("/v1/completions", json=ASK)
        before = tasks()
        for number in range(400):
            body = {**ASK, "max_tokens": 2, "stream": number % 2 == 0, "n": 1 + number % 3}
            assert http.post("/v1/completions", json=body).status_code == 200
        until(lambda: tasks() <= before)
    assert server.lifecycle.in_flight == 0
    server.until_idle()
