"""The bundled model calls functions as its benchmark says, on a part of the benchmark's dialogues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tool_calls import MODEL, fitting, is_object, measure, turns
from penstock import LLM, ToolChoice, ToolMode
from penstock.config.errors import ParameterError

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "book", "parameters": {"type": "object", "properties": {"seats": {"enum": [1, 2]}}}},
}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "A table for two, please."}],
    "parse": True,
    "temperature": 0,
    "max_tokens": 60,
}


def test_the_bundled_model_calls_functions(shared_data: Path) -> None:
    with LLM(MODEL, threads=1) as llm:
        figures = measure(llm, fitting(llm, list(turns(shared_data, 8))))
    auto, required, calling = figures["auto"], figures["required"], figures["calling_turns"]
    assert calling > 15
    assert auto["called"] >= 0.85 * calling
    assert auto["parsed"] == auto["calls"]
    assert auto["texts_with_marks"] == 0
    assert required["called"] == calling
    assert required["valid_of_those"] == required["calls_that_ended"] > 0.9 * calling
    assert required["function_right"] >= 0.65 * calling


def test_reasoning_ends_at_its_budget_and_is_followed_by_what_is_held() -> None:
    with LLM(MODEL, threads=1, reasoning_parser="deepseek_r1", kv_blocks=64) as llm:
        free = llm.chat(**ASKED, thinking_budget=3)[0].outputs[0]
        held = llm.chat(**ASKED, thinking_budget=3, tools=[TOOL], tool_choice=ToolChoice(ToolMode.NAMED, "book"))[0]
    assert free.reasoning
    assert held.outputs[0].reasoning
    assert held.outputs[0].text == ""
    assert [call.name for call in held.outputs[0].tool_calls] == ["book"]
    assert all(is_object(call.arguments) for call in held.outputs[0].tool_calls)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ParameterError, match='reasoning-parser is "r2"'):
        LLM(MODEL, reasoning_parser="r2")
