"""Tool calls and reasoning over HTTP, with the openai package and an engine that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest

from penstock.config.constraint import ToolChoice, ToolMode
from penstock.config.sampling import SamplingParams
from penstock.engine.text_pipeline import TextPipeline
from penstock.text.parsers.format import choose
from penstock.text.parsers.reading import Reading, answer_readers
from tests.server.support import Running, running, script_of

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "book", "parameters": {"type": "object", "properties": {"seats": {"type": "integer"}}}},
}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "book", "arguments": {"seats": 2, "at": "Café \\"Ö\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "book", "arguments": {}}\n</tool_call>'
)
CUT = '<tool_call>\n{"name": "book", "arguments": {"seats": 2, "at": "Ca'
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


THOUGHT = "<think>\nTwo seats.\n</think>\n\nHere you are."


@pytest.fixture(scope="module")
def thinking(text: TextPipeline) -> Iterator[Running]:
    """A server whose model reasons before it answers."""
    with running(replace(text, answers=choose("<tool_call></think>"))) as server:
        server.runner.script = script_of(text, THOUGHT)
        yield server


@pytest.fixture
def thinker(thinking: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def test_reasoning_is_told_apart(thinker: openai.OpenAI, text: TextPipeline) -> None:
    answer = thinker.chat.completions.create(model="scripted", messages=HELLO)  # type: ignore[arg-type]
    message: Any = answer.choices[0].message
    assert (message.reasoning_content, message.reasoning) == ("Two seats.", "Two seats.")
    assert message.content == "Here you are."
    counted = len(text.tokenizer.encode("<think>\nTwo seats.\n</think>", add_special_tokens=False))
    assert abs(answer.usage.completion_tokens_details.reasoning_tokens - counted) <= 8  # what begins it is in pieces
    parts: list[Any] = list(thinker.chat.completions.create(model="scripted", messages=HELLO, stream=True))  # type: ignore
    deltas = [part.choices[0].delta for part in parts]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Two seats."
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Two seats."
    assert "".join(delta.content or "" for delta in deltas) == "Here you are."


def test_reasoning_may_be_left_out(thinker: openai.OpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": HELLO, "extra_body": {"include_reasoning": False}}
    message: Any = thinker.chat.completions.create(**asked).choices[0].message
    assert message.content == "Here you are."
    assert not hasattr(message, "reasoning_content")
    parts: list[Any] = list(thinker.chat.completions.create(**asked, stream=True))
    assert not any(hasattr(part.choices[0].delta, "reasoning") for part in parts)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "Here you are."


def test_an_answer_that_goes_on_within_reasoning(thinker: openai.OpenAI, thinking: Running, text: TextPipeline) -> None:
    before = thinking.runner.script
    thinking.runner.script = script_of(text, " seats.</think>Here.")
    messages: Any = [*HELLO, {"role": "assistant", "content": "<think>Two"}]
    own = {"continue_final_message": True, "add_generation_prompt": False}
    asked: Any = {"model": "scripted", "messages": messages, "extra_body": own}
    message: Any = thinker.chat.completions.create(**asked).choices[0].message
    assert (message.reasoning_content, message.content) == ("seats.", "Here.")
    messages[-1]["content"] = "<think>Two seats.</think>"
    message = thinker.chat.completions.create(**asked).choices[0].message
    assert message.content == " seats.</think>Here."
    thinking.runner.script = before


def test_a_stop_string_within_a_call_closes_it(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="scripted", messages=HELLO, tools=[TOOL], stop=["Café"])  # type: ignore
    calls = answer.choices[0].message.tool_calls or []
    assert json.loads(calls[0].function.arguments) == {"seats": 2, "at": ""}


def test_logprobs_beside_calls(api: openai.OpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": HELLO, "tools": [TOOL], "logprobs": True, "top_logprobs": 1}
    whole = api.chat.completions.create(**asked).choices[0].logprobs.content
    parts = list(api.chat.completions.create(**asked, stream=True))
    streamed = [entry for part in parts if part.choices[0].logprobs for entry in part.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('Let me see.\n<tool_call>\n{"name": "book", "arguments": {"seats": 2, "at": "Ca', '{"seats": 2, "at": "Ca'),
        ('Let me see.\n<tool_call>\n{"name": "book", "arg', ""),
        ('Let me see.\n<tool_call>\n{"na', None),
    ],
)
def test_calls_that_are_cut_at_the_length_are_told_as_far_as_they_came(
    api: openai.OpenAI, server: Running, text: TextPipeline, written: str, told: str | None
) -> None:
    """A whole answer and a stream say the same, and what is no valid JSON is not made to look so."""
    server.runner.script = script_of(text, written)
    size = len(text.tokenizer.encode(written, add_special_tokens=False))
    asked: Any = {"model": "scripted", "messages": HELLO, "tools": [TOOL], "max_tokens": size}
    (choice,) = api.chat.completions.create(**asked).choices
    assert (choice.finish_reason, choice.message.content) == ("length", "Let me see.")
    calls = [call.function.arguments for call in choice.message.tool_calls or ()]
    assert calls == ([] if told is None else [told])
    chunks = [chunk.choices[0] for chunk in api.chat.completions.create(**asked, stream=True)]
    assert chunks[-1].finish_reason == "length"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert "".join(piece.function.arguments for piece in pieces) == (told or "")
    assert [piece.function.name for piece in pieces if piece.id] == ([] if told is None else ["book"])


def test_a_call_that_is_cut_in_the_other_dialects(server: Running, text: TextPipeline) -> None:
    """Where arguments are an object it has what is whole; where they are text, what came."""
    before, server.runner.script = server.runner.script, script_of(text, CUT)
    size = len(text.tokenizer.encode(CUT, add_special_tokens=False))
    function = TOOL["function"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        tools: Any = [{"type": "function", "strict": False, **function}]
        asked: Any = {"model": "scripted", "input": "Hello", "tools": tools, "max_output_tokens": size}
        response = api.responses.create(**asked)
        (item,) = response.output
        assert (response.status, item.type, item.status) == ("incomplete", "function_call", "incomplete")
        assert item.arguments == '{"seats": 2, "at": "Ca'
        events = list(api.responses.create(**asked, stream=True))
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.arguments for event in done] == [item.arguments]
        assert events[-1].type == "response.incomplete"
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as messages:
        tool: Any = {"name": "book", "input_schema": function["parameters"]}
        said: Any = {"model": "scripted", "max_tokens": size, "messages": HELLO, "tools": [tool]}
        message = messages.messages.create(**said)
        assert message.stop_reason == "max_tokens"
        assert [(block.type, block.input) for block in message.content] == [("tool_use", {"seats": 2})]
        with messages.messages.stream(**said) as stream:
            final = stream.get_final_message()
        assert (final.stop_reason, final.content[0].type) == ("max_tokens", "tool_use")
        assert final.content[0].input["seats"] == 2
    server.runner.script = before


@pytest.mark.parametrize("written", ["<tool", "<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "book", "arg'])
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("short", [True, False], ids=["no room", "stopped"])
def test_a_required_call_that_is_cut_off_is_no_text(text: TextPipeline, written: str, others: int, short: bool) -> None:
    """Where one function alone can be meant, its call is told without arguments."""
    tools = [TOOL, *[{"type": "function", "function": {"name": "other"}}] * others]
    choice = ToolChoice(ToolMode.REQUIRED)
    reading = Reading.of(text.answers, text.tokenizer, (1,), HELLO, tools, choice, False, "id")
    (reader,) = answer_readers(text.tokenizer, SamplingParams(), False, reading, text.mark_ids).values()
    told = reader.push(text.tokenizer.encode(written), True, short).told
    assert "".join(part.text for part in told) == ""
    calls = [(call.name, call.arguments) for part in told for call in part.tool_calls]
    known = short and "book" in written
    assert calls == ([("book", "" if short else "{}")] if known or not others else [])
