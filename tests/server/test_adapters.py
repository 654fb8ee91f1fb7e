"""Adapters by name over HTTP: every dialect's way to ask for one, and how they come and go."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.host.adapters import AdapterNames
from penstock.weights.adapters.open import adapter_digest
from tests.engine.support import ADAPTER_SLOTS
from tests.server.support import Running, running, until
from tests.weights.adapters.test_peft import write

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return {name: write(place / name, lora_alpha=8 + number) for number, name in enumerate(("one", "two", "three"))}


@pytest.fixture(scope="module")
def modules(folders: dict[str, Path]) -> tuple[str, ...]:
    return tuple(f"{name}={folders[name]}" for name in ("one", "two"))


@pytest.fixture
def own(text: TextPipeline, modules: tuple[str, ...]) -> Iterator[Running]:
    with running(text, ServerOptions(lora_modules=modules, admin_keys=("admin",))) as server:
        yield server


ADMIN = {"x-admin-key": "admin"}


def asked(server: Running, path: str, body: dict[str, Any]) -> list[tuple[str, float]]:
    """The adapters with which a body was answered: their digests, and how much of each counts."""
    server.runner.seen.clear()
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    (row,) = server.runner.seen
    return [(use.digest, use.weight) for _, use in row.adapters]


def refused(server: Running, path: str, body: Any, status: int, **headers: str) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_every_dialect_names_one(own: Running, folders: dict[str, Path]) -> None:
    one = [(adapter_digest(folders["one"]), 1.0)]
    for path, body in {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
        "/v1/messages": CHAT,
        "/v1/responses": {"input": "Hello"},
        "/api/chat": {"messages": CHAT["messages"], "stream": False},
        "/completion": {"prompt": "Hello", "n_predict": 2},
    }.items():
        assert asked(own, path, {**body, "model": "one"}) == one, path
        assert asked(own, path, {**body, "model": "scripted"}) == [], path
    for path, body in {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "Hello", "max_tokens": 2}}.items():
        assert asked(own, path, {**body, "model": "scripted:one"}) == one, "as SGLang's clients write it"
        assert asked(own, path, {**body, "lora_path": "one"}) == one
        refused(own, path, {**body, "model": "other:one"}, 404)
        refused(own, path, {**body, "lora_path": "one", "lora": [{"id": 0, "scale": 1}]}, 400)
    tgi = {"inputs": "Hello", "parameters": {"adapter_id": "one"}}
    assert asked(own, "/generate", tgi) == asked(own, "/generate", {"text": "Hello", "lora_path": "one"}) == one


def test_every_request_of_a_beam_search_has_it(own: Running, folders: dict[str, Path]) -> None:
    own.runner.seen.clear()
    body = {"prompt": "Hello", "model": "one", "max_tokens": 3, "n": 2, "use_beam_search": True}
    answer = httpx.post(f"{own.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    digests = [[use.digest for _, use in row.adapters] for row in own.runner.seen]
    assert len(digests) > 1 and all(one == [adapter_digest(folders["one"])] for one in digests)


def test_llama_servers_clients_name_them_by_number(own: Running, folders: dict[str, Path]) -> None:
    listed = httpx.get(f"{own.url}/lora-adapters").json()
    assert listed == [{"id": 0, "path": "one", "scale": 0.0}, {"id": 1, "path": "two", "scale": 0.0}]
    one, two = (adapter_digest(folders[name]) for name in ("one", "two"))
    for path, body in {"/completion": {"prompt": "Hello"}, "/v1/chat/completions": CHAT}.items():
        lora = [{"id": 1, "scale": 0.5}, {"id": 0, "scale": 2}]
        assert asked(own, path, {**body, "lora": lora}) == [(two, 0.5), (one, 2.0)]
        assert asked(own, path, {**body, "lora": []}) == []
        assert asked(own, path, {**body, "lora": [{"id": 0, "scale": 0}]}) == []
        refused(own, path, {**body, "lora": [{"id": 2, "scale": 1}]}, 400)
        refused(own, path, {**body, "lora": [{"id": 0}]}, 400)
        refused(own, path, {**body, "lora": [{"id": 0, "scale": 1e39}]}, 400)
    refused(own, "/lora-adapters", [{"id": 0, "scale": 1}], 403)
    assert httpx.post(f"{own.url}/lora-adapters", json=[{"id": 0, "scale": 0.25}], headers=ADMIN).is_success
    assert asked(own, "/completion", {"prompt": "Hello"}) == [(one, 0.25)]
    assert asked(own, "/completion", {"prompt": "Hello", "model": "two"}) == [(two, 1.0)]
    assert asked(own, "/completion", {"prompt": "Hello", "lora": [{"id": 1, "scale": 1}]}) == [(two, 1.0)]
    refused(own, "/lora-adapters", [{"id": 9, "scale": 1}], 400, **ADMIN)
    refused(own, "/lora-adapters", {"id": 0}, 400, **ADMIN)
    assert httpx.post(f"{own.url}/lora-adapters", content=b'[],"x":1', headers=ADMIN).status_code == 400
    assert httpx.post(f"{own.url}/lora-adapters", json=[], headers=ADMIN).is_success
    assert asked(own, "/completion", {"prompt": "Hello"}) == []


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_they_come_and_go(own: Running, folders: dict[str, Path], prefix: str) -> None:
    load, unload = f"{own.url}{prefix}/load_lora_adapter", f"{own.url}{prefix}/unload_lora_adapter"
    body = {"lora_name": "three", "lora_path": str(folders["three"])}
    refused(own, f"{prefix}/load_lora_adapter", body, 403)
    answer = httpx.post(load, json=body, headers=ADMIN, timeout=60)
    assert answer.status_code == 200 and "three" in answer.text
    assert asked(own, "/v1/completions", {"prompt": "Hello", "model": "three"}) == [
        (adapter_digest(folders["three"]), 1.0)
    ]
    models = {one["id"]: one for one in httpx.get(f"{own.url}/v1/models").json()["data"]}
    assert list(models) == ["scripted", "one", "two", "three"]
    assert models["three"]["parent"] == "scripted" and models["three"]["adapter"] == {"id": 2, "rank": 4}
    error = refused(own, f"{prefix}/load_lora_adapter", body, 400, **ADMIN)["error"]
    assert "load_inplace" in (error["message"] if isinstance(error, dict) else str(error))
    other = {"lora_name": "three", "lora_path": str(folders["one"]), "load_inplace": True}
    assert httpx.post(load, json=other, headers=ADMIN, timeout=60).status_code == 200
    assert asked(own, "/v1/completions", {"prompt": "Hello", "model": "three"}) == [
        (adapter_digest(folders["one"]), 1.0)
    ]
    assert httpx.post(unload, json={"lora_name": "three"}, headers=ADMIN, timeout=60).status_code == 200
    refused(own, "/v1/completions", {"prompt": "Hello", "model": "three"}, 404)
    refused(own, f"{prefix}/unload_lora_adapter", {"lora_name": "three"}, 404, **ADMIN)


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("scripted", "one", "in use"),
        ("x", "nowhere", "no adapter at"),
        ("x" * 300, "one", "lora_name"),
        ("x\ny", "one", "lora_name"),
        ("", "one", "lora_name"),
    ],
)
def test_what_is_refused(own: Running, folders: dict[str, Path], name: str, path: str, said: str) -> None:
    place = str(folders.get(path, Path("/") / path))
    answer = httpx.post(
        f"{own.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": place}, headers=ADMIN, timeout=60
    )
    assert answer.status_code == 400 and said in answer.text
    assert len(httpx.get(f"{own.url}/lora-adapters").json()) == 2


def test_adapters_that_are_not_there(own: Running) -> None:
    for body in ({"text": "a", "lora_path": "x"}, {"inputs": "a", "parameters": {"adapter_id": "x"}}):
        refused(own, "/generate", body, 404)


def test_an_adapter_that_the_engine_refuses_gets_no_name(
    own: Running, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own.engine.adapters, "_load", None)
    body = {"lora_name": "three", "lora_path": str(folders["three"])}
    answer = httpx.post(f"{own.url}/v1/load_lora_adapter", json=body, headers=ADMIN, timeout=60)
    assert answer.status_code == 400 and "--enable-lora" in answer.text
    refused(own, "/v1/completions", {"prompt": "Hello", "model": "three"}, 404)


def test_an_activated_adapter_is_tried_too(own: Running, tmp_path: Path) -> None:
    """Whatever its invocation is: with a name that nothing has tried it would fail in somebody's request."""
    folder = write(tmp_path / "activated", alora_invocation_tokens=[7, 8])
    own.runner.seen.clear()
    body = {"lora_name": "activated", "lora_path": str(folder)}
    answer = httpx.post(f"{own.url}/v1/load_lora_adapter", json=body, headers=ADMIN, timeout=60)
    assert answer.status_code == 200, answer.text
    (row,) = own.runner.seen
    assert [use.digest for _, use in row.adapters] == [adapter_digest(folder)]


def test_adapters_that_are_in_every_answer(text: TextPipeline, folders: dict[str, Path]) -> None:
    always = (str(folders["one"]), f"{folders['two']}:0.5")
    one, two = (adapter_digest(folders[name]) for name in ("one", "two"))
    with running(text, ServerOptions(lora=always)) as server:
        assert asked(server, "/v1/completions", {"prompt": "Hello"}) == [(one, 1.0), (two, 0.5)]
        assert asked(server, "/v1/completions", {"prompt": "Hello", "model": "two"}) == [(two, 1.0)]


def test_how_they_are_given_at_the_start(folders: dict[str, Path]) -> None:
    path = folders["one"]
    names = AdapterNames((f"a={path}", f'{{"name": "b", "path": "{path}", "base_model_name": "x"}}'))
    assert [one.name for one in names.all()] == ["a", "b"]
    sglang = AdapterNames((f'{{"lora_name": "c", "lora_path": "{path}", "pinned": true}}',)).all()
    assert [(one.name, one.use.pinned) for one in sglang] == [("c", True)]
    assert len({one.use.digest for one in names.all()}) == 1
    for wrong, said in (
        (f"{path}", "name=path"), ("a=", "name=path"), ("{", "name=path"), ("a=/nowhere", "no adapter at"),
        ('{"name": 1, "path": "x"}', "name=path"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            AdapterNames((wrong,))
    with pytest.raises(ConfigError, match="in use"):
        AdapterNames((f"a={path}", f"a={path}"))
    with pytest.raises(ConfigError, match="in use"):
        AdapterNames((f"m={path}",), taken={"m"}.__contains__)
    with pytest.raises(ConfigError, match="finite"):
        AdapterNames(always=(f"{path}:nan",))


def test_a_path_from_the_home_folder_is_kept_whole(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors tell no client a path that the engine knows."""
    monkeypatch.setenv("HOME", str(folders["one"].parent))
    assert AdapterNames(["a=~/one"]).all()[0].use.path == str(folders["one"])


def test_more_of_a_request_than_there_are_slots(own: Running) -> None:
    lora = [{"id": number, "scale": 1} for number in range(2)] * (ADAPTER_SLOTS + 1)
    assert len(asked(own, "/completion", {"prompt": "Hello", "lora": lora})) == 2, "one is named once"


def test_whose_adapters_run_is_told(own: Running) -> None:
    def told() -> list[str]:
        lines = httpx.get(f"{own.url}/metrics").text.splitlines()
        return [line for line in lines if line.startswith("vllm:lora_requests_info{")]

    assert told() == []
    asked(own, "/v1/completions", {"prompt": "Hello", "model": "two"})
    (line,) = told()
    assert 'running_lora_adapters=""' in line and 'waiting_lora_adapters=""' in line
    assert httpx.post(f"{own.url}/pause?mode=keep", headers=ADMIN).is_success
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(asked, own, "/v1/completions", {"prompt": "Hello", "model": "two"})
        until(lambda: 'lora_adapters="two"' in told()[0])
        assert httpx.post(f"{own.url}/resume", headers=ADMIN).is_success
        assert len(answer.result(60)) == 1
    assert 'running_lora_adapters=""' in told()[0] and 'waiting_lora_adapters=""' in told()[0]
