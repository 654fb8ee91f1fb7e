"""An engine that sleeps: its process is gone, and the answers after waking are those of before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.config.options import EngineOptions, ServerOptions
from penstock.engine.api import EngineState
from penstock.engine.text_pipeline import TextPipeline
from penstock.host.process_client import ProcessClient
from tests.server.support import Running, Serving, serving, serving_a_process, until


@pytest.fixture
def concierge(text: TextPipeline) -> Iterator[tuple[Serving, ProcessClient]]:
    client = ProcessClient(EngineOptions(model="penstock-concierge", threads=1, max_model_len=512))
    with serving(client, text) as server:
        until(lambda: client.state is EngineState.READY)
        yield server, client


def post(server: Serving, path: str, **more: object) -> httpx.Response:
    return httpx.post(server.url + path, timeout=60, **more)  # type: ignore[arg-type]


def completed(server: Serving, **body: object) -> httpx.Response:
    asked = {"prompt": "A table for two", "max_tokens": 6, "temperature": 0, **body}
    return httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60)


def sleeps(server: Serving) -> bool:
    return bool(httpx.get(f"{server.url}/is_sleeping", timeout=60).json()["is_sleeping"])


def props(server: Serving) -> dict[str, Any]:
    """llama-server's, which a sleeping engine's server answers as well."""
    answer = httpx.get(f"{server.url}/props", timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.parametrize(
    ("sleep", "wake"),
    [("/sleep", "/wake_up"), ("/release_memory_occupation", "/resume_memory_occupation")],
)
def test_it_gives_all_back_and_answers_as_before(
    concierge: tuple[Serving, ProcessClient], sleep: str, wake: str
) -> None:
    server, client = concierge
    truth, process = completed(server).json()["choices"], psutil.Process(client.pid)
    assert not sleeps(server) and props(server)["is_sleeping"] is False
    for _ in range(2):  # the second changes nothing
        assert post(server, sleep).json() == {"status": "sleeping"} and sleeps(server)
    assert client.pid == 0 and not process.is_running()
    refused = completed(server)
    assert props(server)["is_sleeping"] is True and props(server)["total_slots"] > 0
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
    assert refused.headers["retry-after"]
    ready = httpx.get(f"{server.url}/readyz")
    assert (ready.status_code, ready.json()) == (503, {"status": "sleeping"})
    assert httpx.get(f"{server.url}/livez").status_code == 200
    assert httpx.get(f"{server.url}/metrics").status_code == 200
    for _ in range(2):
        assert post(server, wake).json() == {"status": "awake"} and not sleeps(server)
    assert client.pid not in (0, process.pid)
    assert completed(server).json()["choices"] == truth
    assert httpx.get(f"{server.url}/readyz").status_code == 200


def test_a_woken_engine_is_watched_again(text: TextPipeline, tmp_path: Path) -> None:
    with serving_a_process(text, tmp_path, restart=0.01) as (server, client):
        assert post(server, "/sleep").status_code == 200
        assert post(server, "/wake_up").status_code == 200
        first = psutil.Process(client.pid)
        first.kill()
        until(lambda: client.state is EngineState.READY and client.pid not in (0, first.pid))
        assert completed(server).status_code == 200
        assert post(server, "/sleep").status_code == 200 and sleeps(server)


def test_requests_that_come_while_it_comes_to_rest_are_answered_once_it_is_awake(
    concierge: tuple[Serving, ProcessClient],
) -> None:
    server, client = concierge
    truth = completed(server).json()["choices"]
    assert post(server, "/pause?mode=wait").status_code == 200
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(completed(server)))
    asking.start()
    until(lambda: server.wait(client.stats()).waiting == 1)
    assert post(server, "/sleep?mode=wait").status_code == 200
    assert not answers
    assert post(server, "/wake_up").status_code == 200
    asking.join(60)
    assert answers[0].json()["choices"] == truth


def test_an_engine_that_cannot_wake_sleeps_on(
    text: TextPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_a_process(text, tmp_path) as (server, _):
        assert post(server, "/sleep").status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr("penstock.host.child.sys.executable", str(tmp_path / "nothing"))
            failed = post(server, "/wake_up")
            assert failed.status_code == 503 and str(tmp_path) not in failed.text
        assert sleeps(server)
        assert post(server, "/wake_up").status_code == 200
        assert completed(server).status_code == 200


def test_what_is_wrong_is_said(text: TextPipeline, tmp_path: Path) -> None:
    with serving_a_process(text, tmp_path) as (server, _):
        for query in ("level=0", "level=3", "mode=keep", "mode="):
            answer = post(server, f"/sleep?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])
            assert not sleeps(server)
        assert completed(server).status_code == 200


def test_an_engine_in_a_thread_does_not_sleep(server: Running) -> None:
    for path in ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"):
        answer = post(server, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_available")


def test_only_administrators_put_it_to_sleep(text: TextPipeline) -> None:
    client = ProcessClient(EngineOptions(model="penstock-concierge", threads=1, max_model_len=256))
    with serving(client, text, ServerOptions(api_keys=("a",), admin_keys=("boss",))) as server:
        until(lambda: client.state is EngineState.READY)
        for path in ("/sleep", "/wake_up"):
            assert post(server, path, headers={"Authorization": "Bearer a"}).status_code == 403
        assert post(server, "/sleep", headers={"Authorization": "Bearer boss"}).status_code == 200
