"""Answers that have to call, or whose calls have to fit: the bundled model, OpenAI's client, a socket."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from penstock.config.errors import GRAMMAR_TOO_COMPLEX, NO_TOKEN_ALLOWED
from penstock.config.options import EngineOptions
from penstock.engine.api import EngineState
from penstock.engine.build import build_engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.server import structured
from penstock.server.active_call import GenerationError
from penstock.server.dialects.openai import translate
from penstock.text.parsers.reading import Reading
from tests.server.support import serving, until

SCHEMAS: dict[str, Any] = {
    "book_table": {
        "type": "object",
        "properties": {
            "restaurant": {"type": "string", "maxLength": 20},
            "seats": {"type": "integer", "minimum": 1, "maximum": 9},
            "outside": {"type": "boolean"},
        },
        "required": ["restaurant", "seats"],
        "additionalProperties": False,
    },
    "look_up": {"type": "object", "properties": {"kind": {"enum": ["hotel", "museum"]}}, "required": ["kind"]},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
UNMET = {"type": "object", "properties": {"a": {"type": "string", "pattern": "((("}}, "additionalProperties": False}
ASKED: dict[str, Any] = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "A table for two at Nopa, please."}],
    "max_tokens": 200,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def api(text: TextPipeline) -> Iterator[openai.OpenAI]:
    client = ThreadClient(lambda: build_engine(EngineOptions(model="penstock-concierge", threads=1)))
    with serving(client, text) as server:
        until(lambda: client.state is EngineState.READY)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
            yield api


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def check(calls: Any) -> None:
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_fit(api: openai.OpenAI, seed: int) -> None:
    asked = {**ASKED, "tools": TOOLS, "tool_choice": "required", "temperature": 1.5, "seed": seed}
    choice = api.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    check(choice.message.tool_calls)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_function_is_called_and_ends_as_an_answer_does(api: openai.OpenAI, name: str) -> None:
    choice = api.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=named(name)).choices[0]
    calls = choice.message.tool_calls or []
    assert [call.function.name for call in calls] == [name]
    assert choice.finish_reason == "stop"
    check(calls)


def test_the_input_of_a_custom_tool_fits_its_expression(api: openai.OpenAI) -> None:
    grammar = {"syntax": "regex", "definition": '[0-9]{3}-"[a-z]{2}'}
    tool: Any = {"type": "custom", "custom": {"name": "run", "format": {"type": "grammar", "grammar": grammar}}}
    choice: Any = {"type": "custom", "custom": {"name": "run"}}
    for seed in range(3):
        asked = {**ASKED, "temperature": 1, "seed": seed, "tools": [*TOOLS, tool], "tool_choice": choice}
        (call,) = api.chat.completions.create(**asked).choices[0].message.tool_calls or ()
        assert re.fullmatch(grammar["definition"], call.custom.input)
    bad: Any = {"type": "custom", "name": "run", "format": {"type": "grammar", "syntax": "regex", "definition": "((("}}
    with pytest.raises(openai.BadRequestError) as refused:
        api.responses.create(model="scripted", input="Hello", tools=[bad], tool_choice="required")
    assert refused.value.param == "tools[0].format.definition"


def test_a_stream_of_a_required_call_equals_the_whole(api: openai.OpenAI) -> None:
    asked = {**ASKED, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = api.chat.completions.create(**asked).choices[0].message.tool_calls[0]
    parts = [
        call
        for chunk in api.chat.completions.create(**asked, stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert parts[0].function.name == whole.function.name
    assert "".join(part.function.arguments for part in parts) == whole.function.arguments


def test_without_parallel_calls_there_is_one(api: openai.OpenAI) -> None:
    for seed in range(4):
        asked = {**ASKED, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        assert len(api.chat.completions.create(**asked | {"temperature": 2}).choices[0].message.tool_calls) == 1


def test_strict_functions_leave_text_free(api: openai.OpenAI) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for seed in range(3):
        message = (
            api.chat.completions.create(**ASKED | {"temperature": 1, "seed": seed}, tools=strict).choices[0].message
        )
        assert message.content or message.tool_calls
        check(message.tool_calls or ())


def test_a_schema_beside_functions(api: openai.OpenAI) -> None:
    """The answer is a document of the schema or a call."""
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for seed in range(3):
        asked = {**ASKED, "temperature": 1, "seed": seed, "tools": TOOLS, "response_format": form}
        message = api.chat.completions.create(**asked).choices[0].message
        if not message.tool_calls:
            jsonschema.validate(json.loads(message.content), schema)


@pytest.mark.parametrize("choice", ["required", named("look_up")], ids=["required", "named"])
def test_an_answer_cannot_both_call_and_fit_another_form(api: openai.OpenAI, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="call a function, and to fit a regex") as refused:
        api.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice, extra_body={"guided_regex": "[0-9]{3}"})
    assert refused.value.param == "tool_choice"
    told = api.chat.completions.create(**ASKED, tools=TOOLS, extra_body={"guided_regex": "[0-9]{3}"}).choices[0].message
    assert told.content is not None and len(told.content) == 3 and not told.tool_calls


def test_a_schema_that_cannot_be_met_is_about_the_tools(api: openai.OpenAI) -> None:
    tools: list[Any] = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": UNMET}}]
    field = "tools[2].function.parameters"
    with pytest.raises(openai.BadRequestError, match=rf"{re.escape(field)} cannot be met: pattern: ") as refused:
        api.chat.completions.create(**ASKED, tools=tools, tool_choice="required")
    assert (refused.value.param, refused.value.code) == (field, "invalid_function_parameters")


def test_its_field_is_the_one_of_the_dialect(api: openai.OpenAI) -> None:
    functions = [*(tool["function"] for tool in TOOLS), {"name": "f", "parameters": UNMET}]
    with pytest.raises(openai.BadRequestError, match=r"functions\[2\]\.parameters cannot be met") as refused:
        api.chat.completions.create(**ASKED, functions=functions, function_call={"name": "f"})
    assert refused.value.param == "functions[2].parameters"
    flat: list[Any] = [{"type": "function", **function} for function in functions]
    with pytest.raises(openai.BadRequestError, match=r"tools\[2\]\.parameters cannot be met") as refused:
        api.responses.create(model="scripted", input="Hi", tools=flat, tool_choice="required")
    assert refused.value.param == "tools[2].parameters"
    tools: list[Any] = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in functions]
    with (
        anthropic.Anthropic(base_url=str(api.base_url).removesuffix("/v1/"), api_key="none", max_retries=0) as other,
        pytest.raises(anthropic.BadRequestError, match=r"tools\[2\]\.input_schema cannot be met"),
    ):
        other.messages.create(
            model="scripted",
            max_tokens=9,
            messages=[{"role": "user", "content": "Hi"}],
            tools=tools,
            tool_choice={"type": "any"},
        )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"guided_regex": "abc", "bad_words": ["abc", "a", "b", "ab"]}, "no_token_allowed"),
        ({"guided_regex": "abc", "allowed_token_ids": [5]}, "no_token_allowed"),
        ({"guided_regex": r"[\p{L}\p{N}]{1,400}" * 200}, None),
    ],
    ids=["bad words", "allowed ids", "heavy"],
)
def test_a_request_that_contradicts_itself_is_the_clients_fault(
    api: openai.OpenAI, body: dict[str, Any], code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(**ASKED, extra_body=body)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.code in ((code,) if code else ("grammar_too_complex", "invalid_grammar"))
    with pytest.raises(openai.APIError, match=r"banned|grammar"):
        list(api.chat.completions.create(**ASKED, extra_body=body, stream=True))


def test_a_sequence_that_fails_by_the_engines_fault_is_a_500() -> None:
    assert GenerationError("the answer left its grammar").status == 500
    assert GenerationError(None).status == 500
    assert (GenerationError(GRAMMAR_TOO_COMPLEX).status, GenerationError(NO_TOKEN_ALLOWED).status) == (400, 400)


def test_grammars_of_many_functions_are_written_beside_the_event_loop(
    api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop serves all streams: what is written of a request's functions is not written there."""
    written: list[bool] = []
    grammar = Reading.grammar

    def seen(self: Reading, *given: Any) -> str | None:
        try:
            asyncio.get_running_loop()
            written.append(False)
        except RuntimeError:
            written.append(True)
        return grammar(self, *given)

    monkeypatch.setattr(Reading, "grammar", seen)
    api.chat.completions.create(**ASKED | {"max_tokens": 5}, tools=TOOLS, tool_choice="required")
    assert written == [True]


@pytest.mark.parametrize("size", [10, 6000])
def test_large_bodies_are_translated_beside_the_event_loop(
    api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    beside: list[bool] = []

    def seen(fields: Any) -> Any:
        try:
            asyncio.get_running_loop()
            beside.append(False)
        except RuntimeError:
            beside.append(True)
        return structured.asked(fields)

    monkeypatch.setattr(translate, "asked", seen)
    schema = {"anyOf": [{"const": f"value {i}"} for i in range(size)]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    content = api.chat.completions.create(**ASKED, response_format=form).choices[0].message.content
    assert json.loads(content or "").startswith("value ")
    assert beside == [size > 1000]


@pytest.mark.parametrize("choice", ["required", named("g")], ids=["required", "named"])
def test_a_schema_that_is_refused_is_told_with_its_tool(api: openai.OpenAI, choice: Any) -> None:
    counted = {"type": "object", "properties": {"a": {"type": "object", "minProperties": 5}}, "required": ["a"]}
    tool: Any = {"type": "function", "function": {"name": "g", "parameters": counted}}
    with pytest.raises(
        openai.BadRequestError, match=r"tools\[2\]\.function\.parameters: minProperties is 5"
    ) as refused:
        api.chat.completions.create(**ASKED, tools=[*TOOLS, tool], tool_choice=choice)
    assert refused.value.param == "tools[2].function.parameters"


def test_refusals_do_not_show_the_rules_written_for_tools(api: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": UNMET}}
    with pytest.raises(openai.BadRequestError, match="unclosed group") as refused:
        api.chat.completions.create(**ASKED, tools=[tool], tool_choice="required")
    assert not any(word in str(refused.value) for word in ("%json", "x-guidance", "r2"))
