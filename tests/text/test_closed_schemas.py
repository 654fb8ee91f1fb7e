"""Schemas whose objects have the properties alone that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from penstock.text.grammar.closed import closed_schema

A = {"properties": {"a": {"type": "integer"}}}
SHUT = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, SHUT),
        ({"properties": {"b": A}}, {"properties": {"b": SHUT}, "additionalProperties": False}),
        ({"items": A}, {"items": SHUT}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"x": A}, "items": {"$ref": "#/$defs/x"}}, {"$defs": {"x": SHUT}, "items": {"$ref": "#/$defs/x"}}),
        # a property of that name is no keyword,
        ({"properties": {"properties": A}}, {"properties": {"properties": SHUT}, "additionalProperties": False}),
        # what is data stays,
        ({"enum": [A], "const": A, "default": A}, {"enum": [A], "const": A, "default": A}),
        # and so do objects that several schemas speak of, or that say it themselves.
        ({"allOf": [A, {"properties": {"b": {}}}]}, {"allOf": [A, {"properties": {"b": {}}}]}),
        ({**A, "anyOf": [{"required": ["a"], **A}]}, {**A, "anyOf": [{"required": ["a"], **A}]}),
        ({"not": A}, {"not": A}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "patternProperties": {"^x": {}}}, {**A, "patternProperties": {"^x": {}}}),
        ({"$defs": {"x": A}, "allOf": [{"$ref": "#/$defs/x"}]}, {"$defs": {"x": A}, "allOf": [{"$ref": "#/$defs/x"}]}),
        ({**A, "required": ["a"]}, {**SHUT, "required": ["a"]}),
        ({**A, "required": ["a", "b"]}, {**A, "required": ["a", "b"]}),
        ({**A, "required": "b"}, {**SHUT, "required": "b"}),
        (True, True),
    ],
)
def test_what_is_closed(schema: Any, closed: Any) -> None:
    before = json.dumps(schema)
    assert closed_schema(schema) == closed
    assert json.dumps(schema) == before


def test_calls_of_real_dialogues_fit_when_their_functions_are_closed(shared_data: Path) -> None:
    calls = 0
    for line in (shared_data / "chat" / "sgd_dev_200.jsonl").read_text().splitlines():
        dialogue = json.loads(line)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in dialogue["tools"]}
        for message in dialogue["messages"]:
            for call in message.get("tool_calls") or ():
                arguments = call["function"]["arguments"]
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                assert Draft202012Validator(closed_schema(schemas[call["function"]["name"]])).is_valid(arguments)
                calls += 1
    assert calls > 500
