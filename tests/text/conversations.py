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
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi  <there>\n é"}
ANSWER = {"role": "assistant", "content": "Hello! "}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"t": 20}'}


def tool_call(arguments: object) -> dict[str, Any]:
    """An assistant message that calls the tool."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call12345", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


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
    "empty": [],
    "unknown-role": [{"role": "nobody", "content": "x"}],
}
