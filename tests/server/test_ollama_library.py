"""The ollama package pulls, makes, copies and deletes models of the library over a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import ollama
import openai
import pytest

from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.library.store import Store, open_store
from penstock.server.dialects.ollama.models.library import _lines, _Progress
from penstock.server.dialects.ollama.models.library_threads import AT_ONCE, THREAD_NAME, dealt
from penstock.server.siblings import Siblings
from penstock.weights.open import bundled_model_path
from tests.host.support import Engines, source
from tests.library.servers import Hub, running
from tests.server.hosted import Hosting, hosting
from tests.server.support import until


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub()) as server:
        files = {path.name: path.read_bytes() for path in bundled_model_path().iterdir() if path.is_file()}
        server.put("me/concierge", files)
        yield server


@pytest.fixture
def store(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    given = {"PENSTOCK_MODELS": "store", "HF_HOME": "hf", "OLLAMA_MODELS": "ollama"}
    for name, value in given.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return open_store()


@pytest.fixture
def server(store: Store, engines: Engines) -> Iterator[Hosting]:
    with hosting(engines, source("small")) as made:
        yield made


def names(store: Store) -> list[str]:
    return [entry.name for entry in store.list()]


def test_pull_create_copy_and_delete(server: Hosting, store: Store) -> None:
    with ollama.Client(host=server.url) as api:
        told = list(api.pull("me/concierge", stream=True))
        assert told[0].status == "pulling me/concierge" and told[-1].status == "success"
        assert api.pull("me/concierge").status == "success"  # it is there
        assert names(store)[0] == "me/concierge"
        made = api.create(
            "mine", from_="me/concierge", system="Be brief.", parameters={"temperature": 0.5, "stop": "x"}
        )
        assert made.status == "success"
        api.copy("mine", "other:v1")
        assert names(store) == ["me/concierge", "mine:latest", "other:v1", "penstock-concierge"]
        entry = store.find("other:v1")
        assert entry is not None
        made_text = TextPipeline.load(str(entry.path))
        assert made_text.template is not None
        assert "Be brief." in made_text.template.render([{"role": "user", "content": "Hi"}])
        assert (made_text.sampling().temperature, made_text.sampling().stop) == (0.5, ("x",))
        for name in ("mine", "other:v1", "me/concierge"):
            assert api.delete(name).status == "success"
        assert names(store) == ["penstock-concierge"]


def test_what_is_not_there_is_told_with_its_status(server: Hosting, store: Store) -> None:
    with ollama.Client(host=server.url) as api:
        for call in (lambda: api.delete("none"), lambda: api.copy("none", "x"), lambda: api.pull("me/none")):
            with pytest.raises(ollama.ResponseError, match="no model") as refused:
                call()
            assert refused.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="no model me/none"):
            list(api.pull("me/none", stream=True))
        with pytest.raises(ollama.ResponseError) as refused:
            api.create("a", from_="none", system="x", stream=False)
        assert refused.value.status_code == 404
        for name in ("../../etc", "/etc/hostname", "model.gguf", "a/b/c"):
            with pytest.raises(ollama.ResponseError, match="no model's name") as refused:
                api.pull(name)
            assert refused.value.status_code == 400
        for path in ("/etc", str(bundled_model_path())):
            with pytest.raises(ollama.ResponseError, match="no model"):
                api.create("a", from_=path, system="x")
    answer = httpx.post(f"{server.url}/api/create", json={"model": "a"})
    assert answer.status_code == 400 and "neither from nor files" in answer.text
    assert httpx.post(f"{server.url}/api/pull", json={}).status_code == 400


def test_only_administrators_change_the_library(store: Store, text: TextPipeline) -> None:
    options = ServerOptions(api_keys=("user",), admin_keys=("admin",))
    engines = Engines(text)
    with hosting(engines, source("small"), options=options) as server:
        for method, path in (
            ("POST", "pull"),
            ("POST", "push"),
            ("POST", "create"),
            ("POST", "copy"),
            ("DELETE", "delete"),
        ):
            for key, status in ((None, 401), ("user", 403)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                answer = httpx.request(method, f"{server.url}/api/{path}", json={"model": "x"}, headers=headers)
                assert answer.status_code == status
        headers = {"Authorization": "Bearer admin"}
        body = json.dumps({"model": "me/concierge", "stream": False})
        assert httpx.post(f"{server.url}/api/pull", content=body, headers=headers, timeout=60).status_code == 200
    assert names(store)[0] == "me/concierge"


def test_a_client_that_leaves_ends_its_pull_and_what_came_is_kept(server: Hosting, store: Store, hub: Hub) -> None:
    go, file = threading.Event(), "/me/concierge/model.safetensors"

    def held() -> None:
        if hub.sent[file] > 1 << 20:
            go.wait(60)

    hub.on_piece = held
    with httpx.stream("POST", f"{server.url}/api/pull", json={"model": "me/concierge"}, timeout=60) as answer:
        lines = answer.iter_lines()  # which closes the answer when nobody holds it
        assert json.loads(next(lines)) == {"status": "pulling me/concierge"}
        until(lambda: hub.sent[file] > 1 << 20)
    until(lambda: server.lifecycle.in_flight == 0)
    go.set()
    until(lambda: not _works())
    assert names(store) == ["penstock-concierge"]
    before, size = hub.sent[file], len(hub.files[file])
    assert before < size
    with ollama.Client(host=server.url) as api:
        api.pull("me/concierge")
    assert hub.sent[file] - before < size


def test_pulls_that_trickle_take_no_thread_from_others_and_end_with_their_clients(
    server: Hosting, store: Store, hub: Hub
) -> None:
    gate = hub.gates["/me/concierge/model.safetensors"] = threading.Event()
    body = {"model": "me/concierge", "stream": False}
    clients = [_left_open(server, json.dumps(body)) for _ in range(AT_ONCE)]
    until(lambda: _works() == AT_ONCE)  # one loads, the others wait for its lock
    for stream in (False, True):
        refused = httpx.post(f"{server.url}/api/pull", json={**body, "stream": stream}, timeout=60)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert "library is busy" in refused.text
    for path in ("/metrics", "/api/tags"):
        assert httpx.get(f"{server.url}{path}", timeout=60).status_code == 200
    for client in clients:
        client.close()
    until(lambda: _works() <= 1)  # who waited for the lock waits no longer
    gate.set()
    until(lambda: not _works())
    assert names(store) == ["penstock-concierge"]
    assert httpx.post(f"{server.url}/api/pull", json=body, timeout=60).status_code == 200


@pytest.mark.parametrize(("count", "share"), [(1, 4), (2, 2), (3, 1), (4, 1), (9, 1)])
def test_what_a_server_does_at_once_is_dealt_out(count: int, share: int) -> None:
    siblings = Siblings(0, count, lambda message: None, dict)
    assert dealt(4, siblings) == share and dealt(4, None) == 4


async def test_what_was_told_last_is_told_though_the_work_has_ended() -> None:
    class Host:
        async def refresh(self, *, anew: bool) -> None:
            pass

    async def lines(*told: tuple[int, int]) -> list[Any]:
        progress, task = _Progress(), asyncio.get_running_loop().create_future()
        for done, total in told:
            progress.told(done, total)
        task.set_result(None)
        progress.ended(task)
        return [json.loads(line) async for line in _lines(Host(), progress, task, "pulling")]  # type: ignore[arg-type]

    first, last, end = await lines((3, 5), (5, 5))
    assert (first, end) == ({"status": "pulling"}, {"status": "success"})
    assert (last["completed"], last["total"]) == (5, 5)
    assert [line["status"] for line in await lines()] == ["pulling", "success"]


def _left_open(server: Hosting, body: str) -> socket.socket:
    """A connection that asked for a pull and has not read the answer."""
    address = urlsplit(server.url)
    assert address.hostname and address.port
    client = socket.create_connection((address.hostname, address.port))
    head = f"POST /api/pull HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall((head + body).encode())
    return client


def _works() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


def test_openais_client_deletes_what_is_in_the_library(server: Hosting, store: Store) -> None:
    with ollama.Client(host=server.url) as api:
        api.pull("me/concierge")
    name = names(store)[0]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            api.models.delete("small")
        assert refused.value.code == "not_in_library"
        with pytest.raises(openai.NotFoundError):
            api.models.delete("none")
        gone = api.models.delete(name)
    assert (gone.id, gone.object, gone.deleted) == (name, "model", True)
    assert name not in names(store)
