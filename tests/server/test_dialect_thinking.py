"""Reasoning and tool calls through Anthropic's and Ollama's own clients, of an engine that says what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import ollama
import pytest

from penstock.engine.text_pipeline import TextPipeline
from penstock.text.parsers.format import choose
from penstock.text.parsers.reading import visible_ids
from tests.server.support import Running, running, script_of

THOUGHT = "They want a table.\nFor two."
SAID = "Let me see."
ARGUMENTS = [{"seats": 2, "at": 'Café "Ö"'}, {}]
ANSWER = (
    f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n"
    '<tool_call>\n{"name": "book", "arguments": {"seats": 2, "at": "Café \\"Ö\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "ring", "arguments": {}}\n</tool_call>'
)
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SEATS = {"type": "object", "properties": {"seats": {"type": "integer"}, "at": {"type": "string"}}}
SCHEMAS = {"book": SEATS, "ring": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"name": name, "description": "Does.", "input_schema": s} for name, s in SCHEMAS.items()]
FUNCTIONS: list[Any] = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]


@pytest.fixture(scope="module")
def reasoner(text: TextPipeline) -> Iterator[Running]:
    """A server of a model that reasons, then calls."""
    answers = choose("", "hermes", "qwen3")
    own = replace(text, answers=answers, mark_ids=visible_ids(answers, text.tokenizer))
    with running(own) as server:
        server.runner.script = script_of(text, ANSWER)
        yield server


@pytest.fixture(scope="module")
def claude(reasoner: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=reasoner.url, api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def llama(reasoner: Running) -> Iterator[ollama.Client]:
    with ollama.Client(host=reasoner.url) as api:
        yield api


def told(message: Any) -> list[tuple[Any, ...]]:
    read = {
        "thinking": lambda block: (block.thinking, len(block.signature)),
        "text": lambda block: (block.text,),
        "tool_use": lambda block: (block.name, block.input),
    }
    return [(block.type, *read[block.type](block)) for block in message.content]


EXPECTED = [
    ("thinking", THOUGHT, 64),
    ("text", SAID),
    ("tool_use", "book", ARGUMENTS[0]),
    ("tool_use", "ring", ARGUMENTS[1]),
]


def test_anthropic_tells_everything_apart(claude: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    answer = claude.messages.create(model="scripted", max_tokens=900, messages=HELLO, tools=TOOLS, thinking=thinking)
    assert told(answer) == EXPECTED
    assert answer.stop_reason == "tool_use"
    details = answer.usage.output_tokens_details
    assert details is not None
    assert 0 < details.thinking_tokens < answer.usage.output_tokens
    uses = [block.id for block in answer.content if block.type == "tool_use"]
    assert len(set(uses)) == 2
    results = [{"type": "tool_result", "tool_use_id": use, "content": "done"} for use in uses]
    turns: list[Any] = [*HELLO, answer.to_param(), {"role": "user", "content": results}]
    again = claude.messages.create(model="scripted", max_tokens=900, messages=turns, tools=TOOLS)
    assert told(again) == EXPECTED


def test_anthropic_streams_the_same(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model="scripted", max_tokens=900, messages=HELLO, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        assert told(stream.get_final_message()) == EXPECTED
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)


def test_anthropic_of_many_at_once(reasoner: Running) -> None:
    async def ask(api: anthropic.AsyncAnthropic) -> Any:
        async with api.messages.stream(model="scripted", max_tokens=900, messages=HELLO, tools=TOOLS) as stream:
            return await stream.get_final_message()

    async def all_of_them() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=reasoner.url, api_key="none", max_retries=0) as api:
            return await asyncio.gather(*(ask(api) for _ in range(8)))

    assert [told(answer) for answer in asyncio.run(all_of_them())] == [EXPECTED] * 8


def test_anthropic_without_tools_or_text_of_thinking(claude: anthropic.Anthropic) -> None:
    hidden: Any = {"type": "adaptive", "display": "omitted"}
    answer = claude.messages.create(model="scripted", max_tokens=900, messages=HELLO, thinking=hidden)
    assert told(answer)[0] == ("thinking", "", 64)
    assert '{"name": "ring", "arguments": {}}' in told(answer)[1][1]
    none: Any = {"type": "none"}
    chosen = claude.messages.create(model="scripted", max_tokens=900, messages=HELLO, tools=TOOLS, tool_choice=none)
    assert [block.type for block in chosen.content] == ["thinking", "text"]
    assert chosen.stop_reason == "end_turn"


def test_anthropics_runner_of_tools(claude: anthropic.Anthropic, reasoner: Running, text: TextPipeline) -> None:
    """Anthropic's own loop: it calls the functions and sends their results until there is nothing to call."""
    called: list[tuple[str, Any]] = []

    @anthropic.beta_tool
    def book(seats: int, at: str) -> str:
        """Books a table.

        Args:
            seats: how many.
            at: where.
        """
        called.append(("book", (seats, at)))
        reasoner.runner.script = script_of(text, "It is done.")
        return "booked"

    @anthropic.beta_tool
    def ring() -> str:
        """Rings."""
        called.append(("ring", ()))
        return "rung"

    runner = claude.beta.messages.tool_runner(model="scripted", max_tokens=900, messages=HELLO, tools=[book, ring])
    try:
        last = runner.until_done()
    finally:
        reasoner.runner.script = script_of(text, ANSWER)
    assert called == [("book", (2, 'Café "Ö"')), ("ring", ())]
    assert [getattr(block, "text", "") for block in last.content] == ["It is done."]


def test_ollama_tells_everything_apart(llama: ollama.Client) -> None:
    answer = llama.chat("scripted", HELLO, tools=FUNCTIONS, think=True)
    message = answer.message
    assert (message.thinking, message.content) == (THOUGHT, SAID)
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or ()] == [
        ("book", ARGUMENTS[0]),
        ("ring", ARGUMENTS[1]),
    ]
    assert answer.done_reason == "stop"
    parts = list(llama.chat("scripted", HELLO, tools=FUNCTIONS, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == THOUGHT
    assert "".join(part.message.content or "" for part in parts) == SAID
    assert [call for part in parts for call in part.message.tool_calls or ()] == message.tool_calls
    turns = [*HELLO, message, {"role": "tool", "tool_name": "book", "content": "done"}]
    assert llama.chat("scripted", turns, tools=FUNCTIONS).message.content == SAID


def test_ollama_takes_python_functions(llama: ollama.Client) -> None:
    def book(seats: int, at: str) -> str:
        """Books a table.

        Args:
            seats: how many.
            at: where.
        """
        return f"{seats} {at}"

    answer = llama.chat("scripted", HELLO, tools=[book])
    assert answer.message.tool_calls
    assert book(**answer.message.tool_calls[0].function.arguments) == '2 Café "Ö"'


@pytest.mark.parametrize("think", [None, True, False, "low"])
def test_ollama_generates_with_or_without_thinking(llama: ollama.Client, think: Any) -> None:
    answer = llama.generate("scripted", "Hello", think=think)
    assert answer.thinking == (None if think is False else THOUGHT)
    assert (answer.response or "").startswith(SAID)
    assert (llama.generate("scripted", "Hello", raw=True).response or "").startswith("<think>\n")


def test_ollama_says_what_the_model_can(llama: ollama.Client) -> None:
    assert llama.show("scripted").capabilities == ["completion", "embedding", "tools", "thinking"]
