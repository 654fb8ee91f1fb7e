"""Anthropic's conversations as templates know them."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import pytest

from penstock.config.constraint import GrammarKind, ToolMode
from penstock.server.body import validate
from penstock.server.dialects.anthropic.schema import MessagesBody
from penstock.server.dialects.anthropic.translate import AnthropicCall, messages_call

TOOL = {
    "name": "book",
    "description": "Books.",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
FUNCTION = {"name": "book", "description": "Books.", "parameters": {"type": "object"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "book", "input": {"seats": 2}}


def call(messages: list[dict[str, Any]] | None = None, **fields: Any) -> AnthropicCall:
    hello = [{"role": "user", "content": "Hello"}]
    body = {"model": "m", "max_tokens": 50, "messages": messages or hello, **fields}
    return messages_call(validate(MessagesBody, body), {"temperature": 0.6})


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def test_a_conversation_with_tools() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("Done."), text("Table 4.")]}
    thought = {"type": "thinking", "thinking": "Two seats.", "signature": "x"}
    asked = call(
        [
            {"role": "user", "content": [text("A table"), text("for two.")]},
            {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "y"}, text("Yes."), USE]},
            {"role": "user", "content": [result, text("Thanks.")]},
        ],
        system=[text("Be kind."), text("Be brief.")],
        tools=[TOOL],
    ).request
    function = {"name": "book", "arguments": {"seats": 2}}
    assert asked.messages == (
        {"role": "system", "content": "Be kind.\nBe brief."},
        {"role": "user", "content": "A table\nfor two."},
        {
            "role": "assistant",
            "content": "Yes.",
            "reasoning_content": "Two seats.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "book", "content": "Done.\nTable 4."},
        {"role": "user", "content": "Thanks."},
    )
    assert asked.tools == ({"type": "function", "function": FUNCTION},)
    assert (asked.parse, asked.add_generation_prompt, asked.continue_final_message) == (True, True, False)


def test_turns_of_one_side_become_one() -> None:
    said = [{"role": "user", "content": "One."}, {"role": "user", "content": [text("Two.")]}]
    assert call(said).request.messages == ({"role": "user", "content": "One.\nTwo."},)


def test_a_failed_tool_says_so() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no table", "is_error": True}
    said = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    messages = call([{"role": "user", "content": "x"}, *said]).request.messages
    assert messages is not None
    assert messages[-1]["content"] == "Error: no table"


def test_the_assistants_last_words_are_continued() -> None:
    asked = call([{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is ("}]).request
    assert (asked.add_generation_prompt, asked.continue_final_message) == (False, True)


@pytest.mark.parametrize(
    ("choice", "mode", "name", "parallel"),
    [
        ({"type": "auto"}, ToolMode.AUTO, "", True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolMode.REQUIRED, "", False),
        ({"type": "tool", "name": "book"}, ToolMode.NAMED, "book", False),
        ({"type": "none"}, ToolMode.NONE, "", True),
    ],
)
def test_tool_choice(choice: dict[str, Any], mode: ToolMode, name: str, parallel: bool) -> None:
    asked = call(tools=[TOOL], tool_choice=choice).request
    assert (asked.tool_choice.mode, asked.tool_choice.name, asked.tool_choice.parallel) == (mode, name, parallel)
    assert (asked.tools is None) == (mode is ToolMode.NONE)


@pytest.mark.parametrize(
    ("thinking", "enabled", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, True, 2000),
        ({"type": "adaptive"}, True, None),
        ({"type": "disabled"}, False, None),
    ],
)
def test_thinking(thinking: dict[str, Any], enabled: bool, budget: int | None) -> None:
    asked = call(thinking=thinking).request
    assert asked.template_kwargs["enable_thinking"] is enabled
    assert asked.thinking_budget == budget
    assert "enable_thinking" not in call().request.template_kwargs


def test_output_config() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
    asked = call(output_config=config).request
    assert asked.grammar is not None
    assert asked.grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(asked.grammar.source) == schema
    assert asked.template_kwargs["reasoning_effort"] == "high"


def test_sampling() -> None:
    sampling = call(top_k=5, stop_sequences=["\n\n"]).request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.stop) == (0.6, 5, 50, ("\n\n",))


def test_a_models_own_stop_strings_hold_unless_the_client_says_others() -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    own = {"stop": ("END",)}
    assert messages_call(validate(MessagesBody, body), own).request.sampling.stop == ("END",)
    others = {**body, "stop_sequences": ["x"]}
    assert messages_call(validate(MessagesBody, others), own).request.sampling.stop == ("x",)


def test_very_many_blocks_take_no_longer_each() -> None:
    """Joined anew for each block, eight times as many would take 64 times as long."""

    def seconds(blocks: int) -> float:
        content = [{"type": "text", "text": "word"}] * blocks
        gc.disable()  # its passes are counted by objects, not by what is done here
        started = time.thread_time()
        messages = call([{"role": "user", "content": content}]).request.messages
        taken = time.thread_time() - started
        gc.enable()
        assert messages is not None and len(messages[0]["content"]) == blocks * 5 - 1
        return taken

    assert min(seconds(200_000) for _ in range(3)) < 36 * min(seconds(25_000) for _ in range(5))
