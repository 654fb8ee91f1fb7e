"""Loading and unloading by hand, in the words of those whose users know them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from penstock.config.errors import CheckpointError
from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.host.source import ModelSource, RemoteModel
from tests.host.support import Engines, source
from tests.server.hosted import Hosting, hosting
from tests.server.support import until


@pytest.fixture
def many(engines: Engines) -> Iterator[Hosting]:
    away = ModelSource("away", remote=RemoteModel("http://127.0.0.1:9/v1", "x"))
    with hosting(engines, source("small"), source("large"), away) as server:
        yield server


def post(server: Hosting, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def get(server: Hosting, path: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", timeout=60)


def test_as_llama_servers_router(many: Hosting) -> None:
    gate = many.engines.gates["small"] = threading.Event()

    def statuses() -> dict[str, str]:
        return {model["id"]: model["status"]["value"] for model in get(many, "/models").json()["data"]}

    assert statuses() == {"small": "unloaded", "large": "unloaded", "away": "unloaded"}
    assert post(many, "/models/load", model="small").json() == {"success": True}
    until(lambda: get(many, "/models").json()["data"][0]["status"] == {"value": "loading", "progress": 0.5})
    gate.set()
    until(lambda: statuses()["small"] == "loaded")
    assert post(many, "/models/unload", model="small").json() == {"success": True}
    assert statuses()["small"] == "unloaded"


def test_llama_servers_router_tells_what_changes(many: Hosting) -> None:
    events: list[dict[str, object]] = []
    with httpx.stream("GET", f"{many.url}/models/sse", timeout=60) as answer:
        lines = (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: "))
        events += [next(lines) for _ in range(3)]
        assert [(told["model"], told["data"]) for told in events] == [
            (name, {"status": "unloaded"}) for name in ("small", "large", "away")
        ]
        assert post(many, "/models/load", model="small").json() == {"success": True}
        while events[-1]["data"] != {"status": "loaded"}:
            events.append(next(lines))
    assert {told["model"] for told in events[3:]} == {"small"}
    assert {told["event"] for told in events} == {"model_status"}


def test_llama_servers_router_without_a_model(many: Hosting) -> None:
    told = get(many, "/props").json()
    assert (told["role"], told["max_instances"]) == ("router", 3)
    assert get(many, "/props?model=small").json()["model_alias"] == "small"


def test_as_lm_studio(many: Hosting) -> None:
    loaded = post(many, "/api/v1/models/load", model="small", context_length=99, echo_load_config=True).json()
    assert (loaded["type"], loaded["instance_id"], loaded["status"]) == ("llm", "small", "loaded")
    assert loaded["load_time_seconds"] >= 0
    listed = {model["key"]: model for model in get(many, "/api/v1/models").json()["models"]}
    assert listed["small"]["loaded_instances"] == [{"id": "small", "config": {"context_length": 2048}}]
    assert listed["large"]["loaded_instances"] == []
    assert post(many, "/api/v1/models/unload", instance_id="small").json() == {"instance_id": "small"}
    assert not many.engines.live
    wrong = post(many, "/api/v1/models/unload")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "instance_id")


def test_as_tabby(many: Hosting) -> None:
    assert get(many, "/v1/model").status_code == 400
    lines = post(many, "/v1/model/load", model_name="small").text.split("\n\n")
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert told[-1] == {"model_type": "model", "module": 2, "modules": 2, "status": "finished"}
    assert get(many, "/v1/model").json()["id"] == "small"
    assert [model["id"] for model in get(many, "/v1/model/list").json()["data"]] == ["small", "large", "away"]
    assert post(many, "/v1/model/unload").status_code == 200
    assert post(many, "/v1/model/unload").json()["error"]["code"] == "no_model_loaded"


def test_as_xinference(many: Hosting) -> None:
    launched = post(many, "/v1/models", model_name="small", model_type="LLM", model_engine="vllm")
    assert launched.json() == {"model_uid": "small"}
    assert many.states()["small"] == "ready"
    assert httpx.delete(f"{many.url}/v1/models/small").status_code == 200
    assert many.states()["small"] == "unloaded"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/models/load", "model"), ("/models/unload", "model"), ("/api/v1/models/load", "model"),
        ("/api/v1/models/unload", "instance_id"), ("/v1/model/load", "model_name"), ("/v1/models", "model_name"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_told(many: Hosting, path: str, field: str) -> None:
    missing = post(many, path, **{field: "smal"})
    assert missing.status_code == 404
    assert 'did you mean "small"?' in missing.json()["error"]["message"]
    away = post(many, path, **{field: "away"})
    assert (away.status_code, away.json()["error"]["code"]) == (400, "remote_model")


def test_a_load_by_hand_is_tried_at_once(many: Hosting) -> None:
    many.engines.errors["small"] = CheckpointError("no")
    for _ in range(2):
        failed = post(many, "/api/v1/models/load", model="small")
        assert failed.status_code == 503
    assert many.engines.loads == ["small", "small"]
    assert get(many, "/models").json()["data"][0]["status"]["failed"]
    lines = post(many, "/v1/model/load", model_name="small").text.strip().split("\n\n")
    assert "could not be loaded: no" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    many.engines.errors.clear()
    assert post(many, "/api/v1/models/load", model="small").status_code == 200


@pytest.mark.parametrize("api_keys", [(), ("user",)])
def test_only_administrators_load_where_there_are_any(engines: Engines, api_keys: tuple[str, ...]) -> None:
    options = ServerOptions(api_keys=api_keys, admin_keys=("boss",))
    with hosting(engines, source("small"), options=options) as server:
        for headers, status in (
            ({"authorization": "Bearer user"}, 403), ({"x-admin-key": "boss"}, 200), ({"x-api-key": "boss"}, 200)
        ):  # fmt: skip
            asked = httpx.post(f"{server.url}/models/load", json={"model": "small"}, headers=headers)
            assert asked.status_code == status, asked.text
        nobody = httpx.delete(f"{server.url}/v1/models/small")
        assert nobody.status_code == (401 if api_keys else 403)
        allowed = httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer user"})
        assert allowed.status_code == 200


def test_others_end_no_engine_that_is_pinned_or_in_use_by_keep_alive(engines: Engines) -> None:
    options = ServerOptions(api_keys=("user",), admin_keys=("admin",))
    sources = (source("small", pinned=True), source("large"))
    engines.gates["large"] = threading.Event()
    with hosting(engines, *sources, options=options) as many:

        def unload(model: str, key: str = "user", read: float = 60.0) -> int:
            headers = {"x-api-key": key}
            body = {"model": model, "keep_alive": 0}
            return httpx.post(
                f"{many.url}/api/chat", json=body, headers=headers, timeout=httpx.Timeout(60, read=read)
            ).status_code

        httpx.post(f"{many.url}/models/load", json={"model": "small"}, headers={"x-api-key": "admin"})
        until(lambda: many.states()["small"] == "ready")
        assert unload("small") == 403
        httpx.post(f"{many.url}/models/load", json={"model": "large"}, headers={"x-api-key": "admin"})
        until(lambda: many.states()["large"] == "loading")
        assert unload("large") == 403
        engines.gates["large"].set()
        until(lambda: many.states()["large"] == "ready")
        assert many.states() == {"small": "ready", "large": "ready"}
        lease = asyncio.run_coroutine_threadsafe(many.host.lease(sources[1]), many.loop).result(60)
        assert unload("large") == 403
        with pytest.raises(httpx.ReadTimeout):
            unload("large", "admin", read=2.0)  # waits for those who use it, and leaves
        until(lambda: many.lifecycle.in_flight == 0)
        many.loop.call_soon_threadsafe(lease.release)
        until(lambda: many.states()["large"] == "asleep")
        assert unload("large") == unload("small", "admin") == 200
        assert set(many.states().values()) == {"unloaded"}


def test_a_server_of_one_model_has_none_of_these(text: TextPipeline) -> None:
    from tests.server.support import running

    with running(text) as server:
        assert httpx.post(f"{server.url}/models/load", json={"model": "scripted"}).status_code == 404
        assert httpx.delete(f"{server.url}/v1/models/scripted").status_code == 405
