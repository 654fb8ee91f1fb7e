"""Many models behind one address: each request gets its own, once it is there."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator

import httpx
import ollama
import openai
import pytest

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import CheckpointError, EngineDeadError
from penstock.engine.api import EngineInfo
from tests.host.support import Engines, SupervisedThread, source
from tests.server.hosted import Hosting, hosting
from tests.server.support import engine_threads, until

HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
def many(engines: Engines) -> Iterator[Hosting]:
    threads = engine_threads()
    with hosting(engines, source("small", aliases=(("gpt-4o-mini", 1.0),)), source("large"), source("other")) as server:
        yield server
    assert engine_threads() == threads


def ask(server: Hosting, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def chat(server: Hosting, model: str | None, **more: object) -> httpx.Response:
    named = {} if model is None else {"model": model}
    return ask(server, "/v1/chat/completions", messages=HELLO, max_tokens=3, **named, **more)


def test_each_request_is_answered_by_its_model(many: Hosting) -> None:
    for model, served in (("small", "small"), ("large", "large"), ("gpt-4o-mini", "small"), ("other", "other")):
        answer = chat(many, model)
        assert answer.status_code == 200
        assert answer.json()["model"] == served
        assert answer.json()["usage"]["completion_tokens"] == 3
    assert many.engines.loads == ["small", "large", "other"]
    assert many.engines.most == 2
    assert many.states() == {"small": "ready", "large": "asleep", "other": "ready"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 2}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
        ("/v1/responses/input_tokens", {"input": "Hello"}),
        ("/api/chat", {"messages": HELLO, "stream": False, "options": {"num_predict": 2}}),
        ("/api/generate", {"prompt": "Hello", "stream": False, "options": {"num_predict": 2}}),
        ("/api/show", {}),
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/apply-template", {"messages": HELLO}),
        ("/v1/chat/completions/render", {"messages": HELLO}),
        ("/v1/completions/render", {"prompt": "Hello"}),
    ],
)
def test_every_dialect_finds_its_model(many: Hosting, path: str, body: dict[str, object]) -> None:
    for model in ("large", "small"):
        answer = ask(many, path, model=model, **body)
        assert answer.status_code == 200, answer.text
    assert many.engines.loads == ["large", "small"]
    missing = ask(many, path, model="smal", **body)
    assert missing.status_code == 404
    assert 'did you mean \\"small\\"?' in missing.text


def test_nothing_is_in_use_when_all_is_answered(many: Hosting) -> None:
    chat(many, "small")
    chat(many, "small", stream=True)
    chat(many, "small", temperature=-1)
    with httpx.stream(
        "POST", f"{many.url}/v1/completions", json={"model": "small", "prompt": "a", "stream": True}
    ) as answer:
        next(answer.iter_lines())
    until(lambda: all(entry.idle for entry in many.host.entries()))


def test_a_name_is_needed_where_there_are_several(many: Hosting) -> None:
    answer = chat(many, None)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith('model is required; available: "small", "large", "other"')


def test_a_stream_is_told_what_it_waits_for(many: Hosting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.hosted_models._PATIENCE_S", 0.02)
    gate = many.engines.gates["small"] = threading.Event()
    body = {"model": "small", "messages": HELLO, "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{many.url}/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(line for line in lines if "%" in line) == ": loading small, 50 % of its weights"
        gate.set()
        told = [line for line in lines if line and not line.startswith(":")]
    assert told[-1] == "data: [DONE]"
    assert json.loads(told[0].removeprefix("data: "))["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    ("path", "event"), [("/v1/chat/completions", ""), ("/v1/messages", "event: error"), ("/v1/responses", "")]
)
def test_a_stream_whose_model_cannot_be_loaded_ends_with_the_reason(
    many: Hosting, monkeypatch: pytest.MonkeyPatch, path: str, event: str
) -> None:
    monkeypatch.setattr("penstock.server.hosted_models._PATIENCE_S", 0.02)
    gate = many.engines.gates["small"] = threading.Event()
    many.engines.errors["small"] = CheckpointError("its weights are damaged; pull it again.")
    asked = {"input": "Hello"} if path == "/v1/responses" else {"messages": HELLO, "max_tokens": 3}
    body = {"model": "small", "stream": True, **asked}
    with httpx.stream("POST", f"{many.url}{path}", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith(": ")
        gate.set()
        last = [line for line in lines if line and not line.startswith(":")]
    assert last[:-1] == ([event] if event else [])
    assert "its weights are damaged; pull it again." in json.loads(last[-1].removeprefix("data: "))["error"]["message"]
    again = ask(many, path, **body)
    assert again.status_code == 503
    assert int(again.headers["retry-after"]) > 0


def test_who_leaves_while_a_model_loads_is_forgotten(many: Hosting) -> None:
    gate = many.engines.gates["small"] = threading.Event()
    body = b'{"model": "small", "prompt": "Hello"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(many.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(head % len(body) + body)
        until(lambda: many.states()["small"] == "loading")
    late = httpx.post(
        f"{many.url}/v1/completions", json={"model": "small", "prompt": "a"}, headers={"x-request-timeout": "0.1"}
    )
    assert late.status_code == 504
    until(lambda: all(entry.idle for entry in many.host.entries()))
    gate.set()
    until(lambda: many.states()["small"] == "ready")


def test_a_response_in_the_background_keeps_its_model(many: Hosting) -> None:
    body = {"model": "small", "input": "Hello", "background": True, "max_output_tokens": 40}
    made = ask(many, "/v1/responses", **body).json()
    done = {"completed", "incomplete", "failed"}
    until(lambda: httpx.get(f"{many.url}/v1/responses/{made['id']}").json()["status"] in done)
    assert httpx.get(f"{many.url}/v1/responses/{made['id']}").json()["status"] != "failed"
    until(lambda: all(entry.idle for entry in many.host.entries()))


def test_models_are_listed_with_what_they_do(many: Hosting) -> None:
    chat(many, "large")
    with openai.OpenAI(base_url=f"{many.url}/v1", api_key="none", max_retries=0) as api:
        listed = {model.id: model for model in api.models.list()}
        assert list(listed) == ["small", "gpt-4o-mini", "large", "other"]
        told = {name: model.model_extra["state"] for name, model in listed.items() if model.model_extra}
        assert told == {"small": "unloaded", "gpt-4o-mini": "unloaded", "large": "ready", "other": "unloaded"}
        assert api.models.retrieve("gpt-4o-mini").model_extra == {
            **(listed["small"].model_extra or {}), "root": "small"
        }  # fmt: skip
        with pytest.raises(openai.NotFoundError, match="did you mean"):
            api.models.retrieve("larg")


def test_figures_are_told_by_model(many: Hosting) -> None:
    for _ in range(2):
        chat(many, "small")
    chat(many, "large")
    chat(many, "other")  # for which the first is put away
    chat(many, "small")
    text = httpx.get(f"{many.url}/metrics").text
    assert 'penstock_model_memory_bytes{model_name="small"} 100.0' in text
    for model, tokens in (("small", 9), ("large", 3), ("other", 3)):
        assert f'penstock_generation_tokens_total{{model_name="{model}"}} {tokens}.0' in text
        loads = 2 if model == "small" else 1
        assert f'penstock_model_loads_total{{model_name="{model}"}} {loads}.0' in text
        assert f'vllm:request_generation_tokens_sum{{model_name="{model}"}} {tokens}.0' in text


def test_engines_are_asked_side_by_side_for_figures(many: Hosting, monkeypatch: pytest.MonkeyPatch) -> None:
    chat(many, "small")
    chat(many, "large")
    both, stats = asyncio.Barrier(2), SupervisedThread.stats

    async def together(engine: SupervisedThread) -> EngineStats:
        await both.wait()  # one after the other would wait for ever
        return await stats(engine)

    def away(engine: SupervisedThread) -> EngineInfo:
        raise EngineDeadError("It is being started again.")

    monkeypatch.setattr(SupervisedThread, "stats", together)
    monkeypatch.setattr(SupervisedThread, "info", property(away))
    text = httpx.get(f"{many.url}/metrics").text
    for model in ("small", "large"):
        assert f'penstock_generation_tokens_total{{model_name="{model}"}} 3.0' in text


def test_ollamas_client_switches_loads_and_unloads(many: Hosting) -> None:
    api = ollama.Client(host=many.url)
    assert {model.model for model in api.list().models} == {"small:latest", "large:latest", "other:latest"}
    assert api.ps().models == []
    assert api.generate(model="small:latest").done_reason == "load"
    assert api.chat(model="large", messages=HELLO, options={"num_predict": 2}, keep_alive="10m").done
    assert {model.model for model in api.ps().models} == {"small:latest", "large:latest"}
    assert api.show("large").capabilities
    assert api.generate(model="small", keep_alive=0).done_reason == "unload"
    assert many.states()["small"] == "unloaded"
    api.generate(model="other", prompt="Hello", options={"num_predict": 2}, keep_alive=0)
    until(lambda: many.states()["other"] == "asleep")
    api.generate(model="large", keep_alive=-1)
    assert "9999" in str(httpx.get(f"{many.url}/api/ps").json()["models"][0]["expires_at"])
    with pytest.raises(ollama.ResponseError, match="did you mean"):
        api.chat(model="smalll", messages=HELLO)


def test_a_description_is_of_one_model_and_holds_no_other(many: Hosting) -> None:
    refused = ask(many, "/api/show", model="small", name="large")
    assert refused.status_code == 400 and "send one of them" in refused.text
    assert many.engines.loads == []
    assert ask(many, "/api/show", model="small", name="small:latest").status_code == 200
    assert ask(many, "/api/show", model="", name="large").status_code == 200


def test_the_document_names_all_models(many: Hosting) -> None:
    document = httpx.get(f"{many.url}/openapi.json").json()
    named = document["components"]["schemas"]["ChatBody"]["properties"]["model"]
    assert {"enum": ["small", "large", "other", "gpt-4o-mini"]} in named.get("anyOf", [named])


def test_it_is_ready_without_a_model(many: Hosting) -> None:
    assert httpx.get(f"{many.url}/readyz").json() == {"status": "ready"}
    assert httpx.get(f"{many.url}/livez").status_code == 200


def test_a_server_that_drains_loads_nothing(many: Hosting) -> None:
    many.lifecycle.draining = True
    assert chat(many, "small").json()["error"]["code"] == "shutting_down"
    assert many.engines.loads == []


def test_text_generation_webuis_tokens_are_of_the_model_used_last(many: Hosting) -> None:
    assert chat(many, "small").status_code == 200
    told = ask(many, "/v1/internal/encode", text="Hello")
    assert told.status_code == 200
    assert told.json()["length"] == len(told.json()["tokens"]) > 0
    again = ask(many, "/v1/internal/decode", tokens=told.json()["tokens"])
    assert "Hello" in again.json()["text"]
