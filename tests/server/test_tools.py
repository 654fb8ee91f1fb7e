"""Tool calls and reasoning over HTTP, with the openai package and an engine that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import Running, script_of

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "book", "parameters": {"type": "object", "properties": {"seats": {"type": "integer"}}}},
}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "book", "arguments": {"seats": 2, "at": "Café \\"Ö\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "book", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = [{"seats": 2, "at": 'Café "Ö"'}, {}]


@pytest.fixture
def api(server: Running, text: TextPipeline) -> Iterator[openai.OpenAI]:
    before = server.runner.script
    server.runner.script = script_of(text, CALLS)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api
    server.runner.script = before


def test_calls_of_a_whole_answer(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="scripted", messages=HELLO, tools=[TOOL], n=2)  # type: ignore[list-item]
    for choice in answer.choices:
        assert choice.message.content == "Let me see."
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls or []
        assert [call.function.name for call in calls] == ["book", "book"]
        assert [json.loads(call.function.arguments) for call in calls] == ARGUMENTS
        assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 4


def test_calls_of_a_stream(api: openai.OpenAI) -> None:
    stream = api.chat.completions.create(model="scripted", messages=HELLO, tools=[TOOL], stream=True)  # type: ignore
    text, calls, endings = "", dict[int, list[Any]](), []
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                call = calls.setdefault(piece.index, [piece.id, piece.function.name, ""])
                call[2] += piece.function.arguments or ""
            endings.append(choice.finish_reason)
    assert text == "Let me see."
    assert [call[1] for call in calls.values()] == ["book", "book"]
    assert [json.loads(call[2]) for call in calls.values()] == ARGUMENTS
    assert endings[-1] == "tool_calls"
    assert set(endings[:-1]) == {None}


def test_without_tools_an_answer_is_text(api: openai.OpenAI) -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        answer = api.chat.completions.create(model="scripted", messages=HELLO, **fields)  # type: ignore[call-overload]
        assert '{"name": "book", "arguments": {}}' in (answer.choices[0].message.content or "")
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"


def test_functions_of_old(api: openai.OpenAI) -> None:
    function = TOOL["function"]
    answer = api.chat.completions.create(model="scripted", messages=HELLO, functions=[function])  # type: ignore
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "function_call"
    assert message.tool_calls is None
    assert message.function_call is not None
    assert json.loads(message.function_call.arguments) == ARGUMENTS[0]


def test_calls_cut_off_are_closed(api: openai.OpenAI, text: TextPipeline) -> None:
    size = len(text.tokenizer.encode('Let me see.\n<tool_call>\n{"name": "book", "arguments": {"seats": 2, "at": "Ca'))
    answer = api.chat.completions.create(model="scripted", messages=HELLO, tools=[TOOL], max_tokens=size)  # type: ignore
    assert answer.choices[0].finish_reason == "length"
    calls = answer.choices[0].message.tool_calls or []
    assert json.loads(calls[0].function.arguments)["seats"] == 2
