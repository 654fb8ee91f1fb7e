"""Engines that hold still, by vLLM's and SGLang's routes: over one model, one engine's HTTP process and many models."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import httpx
import pytest

from penstock.config.options import EngineOptions, ServerOptions
from penstock.core.policies.pause import Control
from penstock.core.protocol import Runner
from penstock.engine.api import EngineInfo, EngineState
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.host.engine import Progress
from tests.engine.support import null_engine
from tests.host.support import Engines, source
from tests.server.hosted import hosting
from tests.server.support import ScriptedRunner, Serving, running, serving, until

ENDLESS = {"prompt": "A", "max_tokens": 2000, "ignore_eos": True, "stream": True}


@pytest.fixture
def concierge(text: TextPipeline) -> Iterator[Serving]:
    client = ThreadClient(lambda: build_engine(EngineOptions(model="penstock-concierge", threads=1)))
    with serving(client, text) as server:
        until(lambda: client.state is EngineState.READY)
        yield server


def post(server: Serving, path: str, **body: object) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60) if body else httpx.post(server.url + path, timeout=60)


def completed(server: Serving, **body: object) -> httpx.Response:
    asked = {"prompt": "A table for two", "max_tokens": 6, "temperature": 0, **body}
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)


def is_paused(server: Serving) -> bool:
    return bool(httpx.get(f"{server.url}/is_paused").json()["is_paused"])


def cached(server: Serving) -> int:
    return int(completed(server).json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    ("pause", "resume", "body"),
    [
        ("/pause", "/resume", {}),
        ("/pause?mode=wait", "/resume", {}),
        ("/pause?mode=keep", "/resume", {}),
        ("/pause_generation", "/continue_generation", {"mode": "abort"}),
        ("/pause_generation", "/continue_generation", {"mode": "in_place"}),
        ("/pause_generation", "/continue_generation", {"mode": "retract"}),
    ],
)
def test_who_comes_to_a_paused_engine_waits(
    concierge: Serving, pause: str, resume: str, body: dict[str, object]
) -> None:
    truth = completed(concierge).json()["choices"]
    assert not is_paused(concierge)
    assert post(concierge, pause, **body).status_code == 200 and is_paused(concierge)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(completed(concierge)))
    asking.start()
    until(lambda: httpx.get(f"{concierge.url}/load").json()["server_load"] == 1)
    assert is_paused(concierge) and not answers
    again = {"mode": "abort"} if resume.startswith("/continue") else {}
    assert post(concierge, resume, **again).status_code == 200 and not is_paused(concierge)
    asking.join(60)
    assert answers[0].json()["choices"] == truth


def test_who_was_aborted_is_told_to_come_again(text: TextPipeline) -> None:
    """In each dialect's shape, with 503: the request is right, and nothing has failed."""
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1500}),
        ("/v1/messages", {**chat, "max_tokens": 1500}),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1500}}),
    ]
    answers: list[httpx.Response] = []

    def ask(path: str, body: dict[str, Any]) -> None:
        answers.append(httpx.post(server.url + path, json=body, timeout=60))

    with running(text) as server:
        server.runner.endless, server.runner.delay = True, 0.05  # none comes to its end by itself
        clients = [threading.Thread(target=ask, args=one) for one in asked]
        for client in clients:
            client.start()
        until(lambda: server.live == len(asked))
        assert post(server, "/pause?mode=abort").status_code == 200
        for client in clients:
            client.join(60)
        assert [answer.status_code for answer in answers] == [503] * len(asked), [one.text for one in answers]
        assert all("An operator of this server ended" in one.text and one.headers["retry-after"] for one in answers)
        assert post(server, "/resume").status_code == 200


def test_an_abort_ends_what_runs(concierge: Serving) -> None:
    with httpx.stream(
        "POST", f"{concierge.url}/v1/completions", timeout=60,
        json={"prompt": "A", "max_tokens": 1000, "ignore_eos": True, "stream": True},
    ) as stream:  # fmt: skip
        lines = stream.iter_lines()
        next(lines)
        assert (
            post(
                concierge,
                "/pause",
            ).status_code
            == 200
        )
        rest = "\n".join(lines)
    assert rest.count("data:") < 1000
    assert post(concierge, "/resume").json() == {"status": "resumed"}
    assert completed(concierge).status_code == 200


def test_who_waits_goes_on_waiting_at_a_second_pause(text: TextPipeline) -> None:
    with running(text) as server:
        assert post(server, "/pause?mode=wait").status_code == 200
        asking = threading.Thread(target=lambda: completed(server))
        asking.start()
        until(lambda: server.stats().waiting == 1)
        assert post(server, "/pause?mode=wait").status_code == 200
        assert (server.stats().waiting, server.stats().running) == (1, 0) and not server.runner.seen
        assert post(server, "/resume").status_code == 200
        asking.join(60)
        assert len(server.runner.seen) == 1


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ("/resume", "resumed"),
        ("/pause?mode=keep", "frozen"),
        ("/pause_generation?mode=in_place", "frozen"),
        ("/pause_generation?mode=retract", "frozen"),
    ],
)
def test_a_pause_that_somebody_ends_before_the_engine_rests_is_told(text: TextPipeline, other: str, code: str) -> None:
    with running(text) as server:
        server.runner.endless, server.runner.delay = True, 0.02
        answers: list[httpx.Response] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60) as stream:
            assert stream.status_code == 200
            waiting = threading.Thread(target=lambda: answers.append(post(server, "/pause?mode=wait")))
            waiting.start()
            until(lambda: is_paused(server))
            path, _, mode = other.partition("?mode=")
            body = {"mode": mode} if path == "/pause_generation" else {}
            assert post(server, path if body else other, **body).status_code == 200
            waiting.join(60)
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, code)
        assert is_paused(server) == (code == "frozen")
        assert post(server, "/resume").status_code == 200
        server.until_idle()


class Endless(Engines):
    """Engines whose answers do not end soon."""

    def build(self, name: str, progress: Progress) -> tuple[Engine, EngineInfo]:
        super().build(name, progress)

        def wrap(runner: Runner) -> Runner:
            made = ScriptedRunner(runner, (5, 6))
            made.delay = 0.02
            return made

        return null_engine(wrap=wrap)


def test_where_one_engine_refuses_to_rest_nobody_looks_at_the_others(text: TextPipeline) -> None:
    engines = Endless(text)

    async def looking() -> int:
        tasks = (task.get_coro() for task in asyncio.all_tasks())
        return sum(coroutine.__qualname__.endswith(".heard") for coroutine in tasks if coroutine is not None)

    async def paused() -> list[int]:
        return [(await client.stats()).paused for client in engines.made.values()]

    with hosting(engines, source("one"), source("two")) as server, contextlib.ExitStack() as streams:

        def call(work: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(work, server.loop).result(60)

        for name in ("one", "two"):
            asked = httpx.stream("POST", f"{server.url}/v1/completions", json={**ENDLESS, "model": name}, timeout=60)
            assert streams.enter_context(asked).status_code == 200
        answers: list[httpx.Response] = []
        url = f"{server.url}/pause?mode=wait"
        waiting = threading.Thread(target=lambda: answers.append(httpx.post(url, timeout=60)))
        waiting.start()
        until(lambda: call(paused()) == [1, 1] and call(looking()) == 2)
        server.loop.call_soon_threadsafe(engines.made["one"].control, Control.RESUME)
        waiting.join(60)
        assert answers[0].status_code == 409
        assert call(paused()) == [0, 1] and call(looking()) == 0


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/reset_prefix_cache"), ("POST", "/flush_cache"), ("GET", "/flush_cache")]
)
def test_prefixes_are_forgotten(concierge: Serving, method: str, path: str) -> None:
    cached(concierge)
    assert cached(concierge) > 0
    assert httpx.request(method, concierge.url + path).status_code == 200
    assert cached(concierge) == 0


def test_what_is_wrong_is_said(concierge: Serving) -> None:
    for path in ("/pause?mode=sleep", "/reset_prefix_cache?reset_running_requests=true"):
        assert post(concierge, path).status_code == 400
    assert post(concierge, "/pause_generation", mode="sleep").status_code == 400
    assert not is_paused(concierge)


def test_only_administrators_pause(text: TextPipeline) -> None:
    client = ThreadClient(lambda: build_engine(EngineOptions(model="penstock-concierge", threads=1)))
    with serving(client, text, ServerOptions(api_keys=("a",), admin_keys=("boss",))) as server:
        until(lambda: client.state is EngineState.READY)
        for path in ("/pause", "/resume", "/flush_cache", "/reset_prefix_cache"):
            answer = httpx.post(server.url + path, headers={"Authorization": "Bearer a"})
            assert answer.status_code == 403, answer.text
        assert httpx.post(f"{server.url}/pause", headers={"Authorization": "Bearer boss"}).status_code == 200
