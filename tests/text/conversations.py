"""Conversations every chat template is rendered with."""

from __future__ import annotations

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <now> & 'später'",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City"},
                    "unit": {"type": "string", "enum": ["c", "f"]},
                },
                "required": ["city"],
            },
        },
    }
]
DOCUMENTS: list[dict[str, Any]] = [
    {"doc_id": 1, "title": "Köln", "text": "A city <on> the Rhine.\n", "contents": "A city <on> the Rhine.\n"},
    {"doc_id": 2, "title": "Rain", "text": "It rains & rains.", "contents": "It rains & rains."},
]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi  <there>\n é"}
ANSWER = {"role": "assistant", "content": "Hello! "}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"t": 20}'}


def tool_call(arguments: object) -> dict[str, Any]:
    """An assistant message that calls the tool."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call12345", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _two_calls() -> dict[str, Any]:
    first, second = tool_call({"city": "A"}), tool_call({"unit": "c"})
    return {**first, "tool_calls": [*first["tool_calls"], {**second["tool_calls"][0], "id": "call67890"}]}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "answer": [USER, ANSWER],
    "tool": [USER, tool_call({"city": "Köln"}), RESULT],
    "tool-turns": [SYSTEM, USER, tool_call({"city": "Köln"}), RESULT, ANSWER, USER],
    "tool-text-arguments": [USER, tool_call('{"city": "Köln"}'), RESULT],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "reasoning": [USER, {"role": "assistant", "content": "ok", "reasoning_content": "hmm"}, USER],
    "thought-calls": [
        SYSTEM,
        USER,
        {**tool_call({"city": "Köln"}), "content": None, "reasoning_content": "I must\nlook."},
        RESULT,
        {**ANSWER, "reasoning_content": "So."},
    ],
    "two-calls": [
        USER,
        _two_calls(),
        RESULT,
        {**RESULT, "tool_call_id": "call67890", "content": "{}"},
        {"role": "assistant", "content": "20 <think>x</think> y"},
        USER,
    ],
    "answer-parts": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}, USER],
    "empty": [],
    "unknown-role": [{"role": "nobody", "content": "x"}],
}
