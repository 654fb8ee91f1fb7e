"""Responses and their streams against the published schema of Open Responses, as its types for Python have it."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import openresponses_types as published
import pytest
from pydantic import BaseModel

from penstock.config.errors import EngineDeadError
from penstock.core.request import FinishReason
from penstock.engine.api import Delta
from tests.server.support import Running
from tests.server.test_responses_events import composer, deltas, told

FORM = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
DELTAS = deltas(random.Random(3))
CALLS = Delta(0, finish_reason=FinishReason.STOP)
CASES: dict[str, tuple[dict[str, Any], list[Delta], Exception | None]] = {
    "reasoning, text and calls": ({}, DELTAS, None),
    "summary": ({"reasoning": {"summary": "auto", "effort": "low"}}, DELTAS, None),
    "cut": ({}, deltas(random.Random(4), FinishReason.LENGTH), None),
    "empty": ({}, [CALLS], None),
    "failed": ({}, DELTAS[:5], EngineDeadError("gone")),
    "background": ({"background": True}, DELTAS, None),
    "a function": ({"tool_choice": {"type": "function", "name": "find"}}, DELTAS, None),
    "a form": ({"text": {"format": FORM, "verbosity": "low"}, "top_logprobs": 3, "metadata": {"a": "b"}}, DELTAS, None),
    "sampling": ({"presence_penalty": 0.5, "frequency_penalty": -1.0, "temperature": 0.2, "top_p": 0.3}, DELTAS, None),
}
# OpenAI's clients know these events by the first name alone; all else of them is the same.
NAMES = {f"response.reasoning_text.{end}": f"response.reasoning.{end}" for end in ("delta", "done")}


def schemas() -> dict[str, type[BaseModel]]:
    """By type of event, what it has to hold."""
    found: dict[str, type[BaseModel]] = {}
    for name, kind in vars(published.types).items():
        if inspect.isclass(kind) and issubclass(kind, BaseModel) and name.endswith("StreamingEvent"):
            (value,) = kind.model_fields["type"].annotation  # type: ignore[union-attr, misc]
            found[value.value] = kind
    return found


SCHEMAS = schemas()


def check(event: dict[str, Any]) -> None:
    """Fails unless an event holds all that it has to."""
    event = json.loads(json.dumps(event))
    event["type"] = NAMES.get(event["type"], event["type"])
    if (form := event.get("response", {}).get("text", {}).get("format", {})).get("type") == "json_schema":
        form["schema"] = None  # which the published schema allows nothing else to be; OpenAI tells it
    SCHEMAS[event["type"]].model_validate(event)


@pytest.mark.parametrize("case", CASES)
def test_every_event_holds_what_is_required(case: str) -> None:
    body, given, error = CASES[case]
    events = told(composer(**body), given, error)
    assert len(events) > 4
    for event in events:
        check(event)


@pytest.fixture
def sent(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def test_over_a_socket(sent: httpx.Client) -> None:
    whole = sent.post("/v1/responses", json={"input": "Hello", "tools": [{"type": "function", "name": "find"}]}).json()
    published.ResponseResource.model_validate(whole)
    published.ResponseResource.model_validate(sent.get(f"/v1/responses/{whole['id']}").json())
    stream = sent.post("/v1/responses", json={"input": "Hello", "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    assert events[-1]["type"] == "response.completed"
    for event in events:
        check(event)


def test_the_numbers_are_those_that_count(sent: httpx.Client) -> None:
    asked = CASES["sampling"][0]
    told = sent.post("/v1/responses", json={"input": "Hello", **asked}).json()
    assert {name: told[name] for name in asked} == asked
    told = sent.post("/v1/responses", json={"input": "Hello"}).json()
    assert (told["presence_penalty"], told["frequency_penalty"]) == (0.0, 0.0)


def test_the_error_that_ends_a_stream_is_told_to_both_kinds_of_clients(sent: httpx.Client, server: Running) -> None:
    server.runner.delay, server.runner.endless = 0.05, True
    name = sent.post("/v1/responses", json={"input": "Hello", "background": True}).json()["id"]
    published.ResponseResource.model_validate(sent.post(f"/v1/responses/{name}/cancel").json())
    last = sent.get(f"/v1/responses/{name}?stream=true").text.strip().splitlines()[-1]
    event = json.loads(last.removeprefix("data: "))
    check(event)
    assert event["message"] == event["error"]["message"] == "The response was cancelled."
    assert event["code"] == event["error"]["code"] == "cancelled"


@pytest.mark.parametrize("path", ["compacted", "compact/now", "resp_1/no_such", "input_tokens/x"])
def test_routes_that_are_not_there_are_not_found(sent: httpx.Client, path: str) -> None:
    answer = sent.post(f"/v1/responses/{path}", json={"input": "Hello"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route")


def test_a_wrong_method_of_a_route_that_is_there_is_told(sent: httpx.Client) -> None:
    for path, allowed in (("resp_1", "GET"), ("input_tokens", "POST"), ("compact", "POST")):
        answer = sent.put(f"/v1/responses/{path}")
        assert answer.status_code == 405
        assert allowed in answer.headers["allow"]
