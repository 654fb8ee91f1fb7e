"""The bundled model over the Responses API, through OpenAI's own client: tools, schemas, conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.support import Serving

WEATHER = "What's the weather like in London?"
TOOL: Any = {
    "type": "function",
    "name": "GetWeather",
    "description": "Get the weather of a certain location on a date",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city"}},
        "required": ["city"],
    },
}
FOUND = json.dumps([{"city": "London", "temperature": "61", "precipitation": "20"}])


class Booking(BaseModel, extra="forbid"):
    """A table."""

    seats: Literal[2, 4, 6]
    outside: bool


@pytest.fixture(scope="module")
def api(concierge: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{concierge.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def ask(api: openai.OpenAI, given: Any, **more: Any) -> Any:
    return api.responses.create(model="scripted", input=given, temperature=0, max_output_tokens=120, **more)


def test_a_tool_is_called_and_its_result_answered(api: openai.OpenAI) -> None:
    first = ask(api, WEATHER, tools=[TOOL])
    call = first.output[0]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "GetWeather", {"city": "London"})
    assert first.status == "completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": FOUND}
    kept = ask(api, [result], previous_response_id=first.id, tools=[TOOL])
    assert kept.output_text
    assert kept.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16
    sent = ask(api, [{"role": "user", "content": WEATHER}, call, result], tools=[TOOL], store=False)
    assert sent.output_text == kept.output_text
    assert sent.usage.input_tokens == kept.usage.input_tokens


def test_a_stream_tells_the_same_call(api: openai.OpenAI) -> None:
    whole = ask(api, WEATHER, tools=[TOOL]).output[0]
    events = list(ask(api, WEATHER, tools=[TOOL], stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == whole.arguments
    assert events[-1].response.output[0].arguments == whole.arguments
    assert not any(event.type == "response.output_text.delta" for event in events)


def test_parse_gives_the_model_that_was_asked_for(api: openai.OpenAI) -> None:
    found = api.responses.parse(model="scripted", input="A table for two, please.", text_format=Booking)
    assert isinstance(found.output_parsed, Booking)
    assert found.text.format.type == "json_schema"
    with api.responses.stream(model="scripted", input="A table for two, please.", text_format=Booking) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_response().output_parsed, Booking)


def test_any_json_object(api: openai.OpenAI) -> None:
    text = ask(api, "A table for two, in JSON.", text={"format": {"type": "json_object"}}).output_text
    assert text.startswith("{")


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema", "name": "x", "schema": {"type": "wavelength"}}, "text.format.schema"),
        ({"type": "json_schema", "name": "x"}, "text.format.schema"),
        ({"type": "yaml"}, "text.format.type"),
    ],
)
def test_a_form_that_cannot_be_met(api: openai.OpenAI, form: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(api, "Hello", text={"format": form})
    assert error.value.param == param


def test_tools_that_cannot_be_called(api: openai.OpenAI) -> None:
    hopeless = {**TOOL, "parameters": {"type": "wavelength"}}
    for given in ({"tool_choice": "required", "tools": [hopeless]}, {"tools": [{**hopeless, "strict": True}]}):
        with pytest.raises(openai.BadRequestError) as error:
            ask(api, "Hello", **given)
        assert error.value.param == "tools[0].parameters"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "GetWeather"}])
def test_a_call_that_must_be_made(api: openai.OpenAI, choice: Any) -> None:
    answer = ask(api, "Hello!", tools=[TOOL], tool_choice=choice)
    call = answer.output[-1]
    assert (call.type, call.name) == ("function_call", "GetWeather")
    assert isinstance(json.loads(call.arguments)["city"], str)


def test_tools_that_must_not_be_called(api: openai.OpenAI) -> None:
    answer = ask(api, WEATHER, tools=[TOOL], tool_choice="none")
    assert {item.type for item in answer.output} == {"message"}
    other = {**TOOL, "name": "FindRestaurants", "description": "Find restaurants"}
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "GetWeather"}]}
    answer = ask(api, WEATHER, tools=[TOOL, other], tool_choice=allowed)
    assert answer.output[0].name == "GetWeather"
    assert len(answer.tools) == 2
