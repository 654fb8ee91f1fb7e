"""The bundled model with tools and schemas, through OpenAI's, Anthropic's and Ollama's own clients over a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import ollama
import openai
import pytest
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

from penstock.config.options import EngineOptions
from penstock.engine.api import EngineState
from penstock.engine.build import build_engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.text.parsers.format import choose
from penstock.text.parsers.reading import visible_ids
from tests.server.support import Serving, serving, until

MODEL = "scripted"  # the name the server gives it


class Booking(BaseModel):
    """A table; without lengths, which Anthropic's client leaves out of schemas."""

    model_config = ConfigDict(extra="forbid")
    restaurant: Literal["Nopa", "Zuni"]
    outside: bool


@pytest.fixture(scope="module")
def claude(concierge: Serving) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=concierge.url, api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def llama(concierge: Serving) -> Iterator[ollama.Client]:
    with ollama.Client(host=concierge.url) as api:
        yield api


@pytest.fixture(scope="module")
def dialogue(shared_data: Path) -> dict[str, Any]:
    """A conversation of text up to a turn in which a function is called."""
    for line in (shared_data / "chat" / "sgd_dev_200.jsonl").read_text().splitlines():
        talk = json.loads(line)
        for index, message in enumerate(talk["messages"]):
            if message.get("tool_calls") and not any(m.get("tool_calls") for m in talk["messages"][:index]):
                return {"tools": talk["tools"], "messages": talk["messages"][:index]}
    raise AssertionError("no conversation calls a function")


@pytest.fixture(scope="module")
def expected(concierge: Serving, dialogue: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The call that OpenAI's dialect tells of: name and arguments."""
    with openai.OpenAI(base_url=f"{concierge.url}/v1", api_key="none", max_retries=0) as api:
        answer = api.chat.completions.create(model=MODEL, temperature=0, max_tokens=200, **dialogue)
    call = answer.choices[0].message.tool_calls[0].function
    return call.name, json.loads(call.arguments)


def in_anthropic(dialogue: dict[str, Any]) -> dict[str, Any]:
    functions = [tool["function"] for tool in dialogue["tools"]]
    tools = [{**f, "input_schema": f["parameters"]} for f in functions]
    for tool in tools:
        del tool["parameters"]
    return {"model": MODEL, "max_tokens": 200, "tools": tools, "messages": dialogue["messages"]}


GREEDY = {"temperature": 0}


def test_anthropic_calls_a_tool_and_goes_on(
    claude: anthropic.Anthropic, dialogue: dict[str, Any], expected: tuple[str, dict[str, Any]]
) -> None:
    asked = in_anthropic(dialogue)
    answer = claude.messages.create(**asked, extra_body=GREEDY)
    assert answer.stop_reason == "tool_use"
    use = answer.content[-1]
    assert (use.name, use.input) == expected
    with claude.messages.stream(**asked, extra_body=GREEDY) as stream:
        streamed = stream.get_final_message()
    assert [(block.type, getattr(block, "input", None)) for block in streamed.content] == [
        (block.type, getattr(block, "input", None)) for block in answer.content
    ]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"status": "done"}'}
    turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    further = claude.messages.create(**{**asked, "messages": [*dialogue["messages"], *turns]}, extra_body=GREEDY)
    assert further.usage.cache_read_input_tokens > answer.usage.input_tokens // 2
    assert any(block.type == "text" and block.text for block in further.content)


def test_anthropic_must_call_a_tool(claude: anthropic.Anthropic, dialogue: dict[str, Any]) -> None:
    asked = {**in_anthropic(dialogue), "messages": [{"role": "user", "content": "Hello!"}]}
    schemas = {tool["name"]: tool["input_schema"] for tool in asked["tools"]}
    name = list(schemas)[-1]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": name}):
        answer = claude.messages.create(**asked, tool_choice=choice, extra_body=GREEDY)
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert len(uses) == 1
        jsonschema.validate(uses[0].input, schemas[uses[0].name])
    assert uses[0].name == name


def test_anthropic_follows_a_schema(claude: anthropic.Anthropic) -> None:
    hello = [{"role": "user", "content": "A table for two at Nopa, please."}]
    answer = claude.messages.parse(model=MODEL, max_tokens=200, messages=hello, output_format=Booking)
    assert isinstance(answer.parsed_output, Booking)


def test_anthropic_refuses_a_schema_that_cannot_be_met(claude: anthropic.Anthropic) -> None:
    config = {"format": {"type": "json_schema", "schema": {"type": "wavelength"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema: the grammar cannot be met"):
        claude.messages.create(
            model=MODEL, max_tokens=20, messages=[{"role": "user", "content": "Hi"}], output_config=config
        )


def test_ollama_calls_the_same_tool(
    concierge: Serving, dialogue: dict[str, Any], expected: tuple[str, dict[str, Any]]
) -> None:
    """Without Ollama's client, which writes declarations in an order of its own."""
    body = {"model": MODEL, **dialogue, "options": {**GREEDY, "num_predict": 200}, "stream": False}
    message = httpx.post(f"{concierge.url}/api/chat", json=body, timeout=60).json()["message"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == [expected]


def test_ollama_calls_a_tool_and_goes_on(
    llama: ollama.Client, dialogue: dict[str, Any], expected: tuple[str, dict[str, Any]]
) -> None:
    asked = {"model": MODEL, **dialogue, "options": {**GREEDY, "num_predict": 200}}
    answer = llama.chat(**asked)
    call = answer.message.tool_calls[0].function
    assert call.name == expected[0]
    assert set(call.arguments) == set(expected[1])
    parts = list(llama.chat(**asked, stream=True))
    assert [c for part in parts for c in part.message.tool_calls or ()] == list(answer.message.tool_calls)
    turns = [answer.message, {"role": "tool", "tool_name": call.name, "content": '{"status": "done"}'}]
    assert llama.chat(**{**asked, "messages": [*dialogue["messages"], *turns]}).message.content


def test_ollama_follows_a_schema(llama: ollama.Client) -> None:
    options = {"num_predict": 200, "seed": 1}
    text = "A table for two at Nopa, please."
    chat = [{"role": "user", "content": text}]
    schema = Booking.model_json_schema()
    assert Booking.model_validate_json(llama.chat(MODEL, chat, format=schema, options=options).message.content)
    assert Booking.model_validate_json(llama.generate(MODEL, text, format=schema, options=options).response)
    said = "".join(part.response for part in llama.generate(MODEL, text, format="json", options=options, stream=True))
    assert isinstance(from_json(said, allow_partial="trailing-strings"), dict)  # as far as it goes


def test_ollama_refuses_a_schema_that_cannot_be_met(llama: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"^format: the grammar cannot be met") as refused:
        llama.generate(MODEL, "Hi", format={"type": "wavelength"})
    assert refused.value.status_code == 400


def test_a_budget_ends_thinking(text: TextPipeline) -> None:
    """As of a model whose reasoning the prompt opens: here the conversation does."""
    answers = choose("", "hermes", "qwen3")
    reasoner = replace(text, answers=answers, mark_ids=visible_ids(answers, text.tokenizer))
    client = ThreadClient(lambda: build_engine(EngineOptions(model="penstock-concierge", threads=1)))
    opened: list[Any] = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "<think>What city do"}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "messages": opened, "extra_body": GREEDY}
    with serving(client, reasoner) as own:
        until(lambda: client.state is EngineState.READY)
        with anthropic.Anthropic(base_url=own.url, api_key="none", max_retries=0) as api:
            free = api.messages.create(**asked).content[0].thinking
            held = api.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 3}).content[0].thinking
    assert free.startswith(held)
    assert 0 < len(text.tokenizer.encode(f" {held}", add_special_tokens=False)) <= 3
    assert len(free) > len(held)


def test_what_runs(llama: ollama.Client) -> None:
    listed, shown = llama.list().models[0], llama.show(MODEL)
    assert listed.size > 10**7
    assert listed.modified_at.year > 2000
    assert (listed.details.parameter_size, listed.details.quantization_level) == ("6.95M", "BF16")
    assert llama.ps().models[0].size == listed.size
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert "thinking" not in shown.capabilities
