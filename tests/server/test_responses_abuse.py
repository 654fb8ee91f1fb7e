"""Hostile and unlucky clients of the Responses API: bounded work, clear refusals, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.config import limits
from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.store import ResponseStore
from tests.server.support import ANSWER, Running, running, until


def create(server: Running, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json={"input": "Hello", **body}, timeout=60)


def nested(depth: int) -> Any:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "body",
    [
        {"input": "x" * (limits.MAX_PROMPT_CHARS + 1)},
        {"input": [{"role": "user", "content": "x"}] * (limits.MAX_MESSAGES + 1)},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x" * 10**6}] * 20}]},
        {"input": [{"role": "user", "content": {"type": "input_text"}}]},
        {"input": [[]]},
        {"input": [{"type": ["message"], "role": "user", "content": "x"}]},
        {"input": [{"type": {}, "id": "x"}]},
        {"input": [{"role": "user", "content": "x", "id": 5}]},
        {"input": [{"type": "reasoning", "summary": [5]}]},
        {"input": [{"type": "function_call_output", "call_id": ["x"], "output": "x"}]},
        {"input": [{"type": "item_reference", "id": "_" * 100}]},
        {"input": [{"type": "item_reference", "id": "msg_resp_\x00_1"}]},
        {"previous_response_id": "'; DROP TABLE responses; --"},
        {"previous_response_id": "x" * 10**6},
        {"tools": [{"type": "function", "name": "f"}] * (limits.MAX_TOOLS + 1)},
        {"tools": [{"type": "function", "name": {"a": 1}}]},
        {"tools": [{"type": ["function"], "name": "f"}]},
        {"tool_choice": {"type": "allowed_tools", "tools": 5, "mode": "required"}},
        {"tool_choice": {"type": "allowed_tools", "tools": [{"name": "f"}], "mode": ["auto"]}},
        {"tool_choice": {"type": ["function"]}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": nested(55)}}},
        {"text": {"format": {"type": ["json_schema"]}}},
        {"text": {"format": {"type": "structural_tag", "structures": 5}}},
        {"metadata": {f"key {number}": "x" for number in range(17)}},
        {"metadata": {"key": "x" * 513}},
        {"prompt_cache_key": "x" * 10**6},
        {"max_output_tokens": 10**30},
        {"reasoning": {"effort": 5}},
        {"reasoning": {"budget": 5}},
        {"stop": ["x" * (limits.MAX_STOP_CHARS + 1)]},
    ],
    ids=lambda body: json.dumps(body)[:40],
)
def test_hostile_bodies(server: Running, body: dict[str, Any]) -> None:
    answer = create(server, **body)
    assert answer.status_code in (400, 413), answer.text
    error = answer.json()["error"]
    assert error["param"] or error["code"] in ("body_too_large", "invalid_json")
    assert len(answer.content) < 2000
    assert server.live == 0


@pytest.mark.parametrize("name", ["x" * 5000, "%00", "..%2f..%2fetc", "%ff%fe", "resp_%F0%9F%98%80", "'%20OR%201=1"])
def test_hostile_names(server: Running, name: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        answer = httpx.request(method, f"{server.url}/v1/responses/{name}{path}")
        assert 400 <= answer.status_code < 500
        assert len(answer.content) < 2000


@pytest.mark.parametrize("query", ["starting_after=-1", "starting_after=x", "stream=maybe", "include[]=all"])
def test_hostile_queries(server: Running, query: str) -> None:
    name = create(server).json()["id"]
    answer = httpx.get(f"{server.url}/v1/responses/{name}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split("[")[0] == query.split("=")[0].removesuffix("[]")
    for wrong in ("limit=0", "limit=101", "order=up"):
        assert httpx.get(f"{server.url}/v1/responses/{name}/input_items?{wrong}").status_code == 400


def test_what_runs_in_the_background_is_bounded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BACKGROUND_JOBS", 3)
    server.runner.hold()
    started = [create(server, background=True).json()["id"] for _ in range(3)]
    refused = create(server, background=True)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    for name in started:
        httpx.delete(f"{server.url}/v1/responses/{name}")
    server.runner.go()
    server.until_idle()
    until(lambda: server.lifecycle.in_flight == 0)
    assert create(server, background=True).status_code == 200


def test_followers_that_leave_disturb_nobody(server: Running) -> None:
    server.runner.delay = 0.03
    name = create(server, background=True).json()["id"]
    url = f"{server.url}/v1/responses/{name}?stream=true"
    for _ in range(10):
        with httpx.stream("GET", url) as stream:
            next(stream.iter_lines())
    events = [line for line in httpx.get(url, timeout=60).text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1][6:])["response"]["output"][0]["content"][0]["text"] == ANSWER
    server.until_idle()
    until(lambda: server.lifecycle.in_flight == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_end_their_request(server: Running, stream: bool) -> None:
    server.runner.hold()
    cancelled = server.cancelled
    body = json.dumps({"input": "Hello", "stream": stream}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with server.connect() as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        until(lambda: server.live == 1)
    until(lambda: server.lifecycle.in_flight == 0)
    server.runner.go()
    server.until_idle()
    assert server.cancelled == cancelled + 1


def test_an_answer_that_cannot_be_stored_is_answered(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(ResponseStore, "_put", full)
    answer = create(server).json()
    assert (answer["status"], answer["store"]) == ("completed", False)


def test_what_the_servers_end_interrupts_has_failed(text: TextPipeline, tmp_path: Path) -> None:
    options = ServerOptions(responses_store=str(tmp_path / "responses.db"))
    with running(text, options) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        done = api.responses.create(model="scripted", input="Hello")
        server.runner.delay, server.runner.endless = 0.05, True
        cut = api.responses.create(model="scripted", input="Hello", background=True)
        until(lambda: api.responses.retrieve(cut.id).status == "in_progress")
    store = ResponseStore(options.responses_store)
    found, whole = asyncio.run(_two(store, cut.id, done.id))
    assert (found.object["status"], found.object["error"]["message"]) == ("failed", "The server was shut down.")
    assert whole.object["status"] == "completed"
    with running(text, options) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        assert api.responses.retrieve(done.id) == done
        further = api.responses.create(model="scripted", input="And now?", previous_response_id=done.id)
        assert further.output_text == ANSWER


async def _two(store: ResponseStore, *names: str) -> Any:
    found = [await store.get("", name) for name in names]
    await store.aclose()
    return found
