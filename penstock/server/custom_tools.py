"""OpenAI's custom tools, whose input is a text: to the model each is a function with one string parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.config import limits
from penstock.config.errors import RequestError
from penstock.engine.api import ToolCallDelta
from penstock.server.errors import bad_value
from penstock.server.tool_calls import call_piece, whole_calls
from penstock.text.grammar.lark_regex import LarkError, as_expression, balanced

_INPUT: Final = "input"
_BEGINS: Final = '{"input": "'  # how the parser of answers writes such arguments
_PLAIN: Final = re.compile(r'[^"\\]+')
_ESCAPE: Final = re.compile(
    r"\\(?:[^u]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89abAB])[0-9a-fA-F]{4})"
)
_PARTIAL: Final = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?)?"
)
"""An escape that may be complete when more has come."""
_HALF: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
"""Of a pair of surrogates."""


def as_function(where: str, tool: object) -> dict[str, Any]:
    """The declaration of the function that stands for a custom tool; its name and description are not yet checked.

    Args:
        where: the field that holds the tool.
        tool: name, description, and `format`: text, or a grammar as Responses or as chats have it.

    Raises:
        RequestError: the format is none, or of a syntax that inputs cannot be held to.
    """
    if not isinstance(tool, dict):
        raise bad_value(where, tool, "an object with the tool's name")
    held = _held(where, tool)
    text = {"type": "string", "description": "The whole input of the tool, as it is.", **held}
    parameters = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
    kept = {name: tool[name] for name in ("name", "description") if name in tool}
    return {**kept, "parameters": parameters, "strict": bool(held)}


def _held(where: str, tool: Mapping[str, Any]) -> dict[str, str]:
    """What a JSON schema says of inputs that fit the tool's format."""
    form = tool.get("format")
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return {}
    if not isinstance(form, dict) or form.get("type") != "grammar":
        kind = form.get("type") if isinstance(form, dict) else form
        raise bad_value(f"{where}.format.type", kind, '"text", "grammar"')
    where, grammar = f"{where}.format", form
    if "grammar" in form:
        where, grammar = f"{where}.grammar", form["grammar"]
    syntax = grammar.get("syntax") if isinstance(grammar, dict) else grammar
    if syntax not in ("regex", "lark"):
        raise bad_value(f"{where}.syntax", syntax, '"regex", "lark"')
    if not isinstance(definition := grammar.get("definition"), str):
        raise bad_value(f"{where}.definition", definition, "a string")
    if syntax == "lark":
        definition = _regular(f"{where}.definition", definition)
    if not balanced(definition):
        raise bad_value(f"{where}.definition", definition, "a regular expression whose parentheses are in pairs")
    return {"pattern": f"^(?:{definition})$"}


def _regular(field: str, definition: str) -> str:
    """A Lark grammar as the regular expression that it is: inputs are strings of JSON, which no other can hold."""
    if len(definition) > limits.MAX_LARK_CHARS:
        raise bad_value(field, f"{len(definition)} characters", f"at most {limits.MAX_LARK_CHARS}")
    try:
        return as_expression(definition)
    except LarkError as error:
        raise RequestError(f"{field} cannot be followed: {error}.", param=field, code="invalid_value") from None


def definition_fields(tools: Sequence[object] | None) -> dict[str, str]:
    """Where bodies have what is `tools[N].function.parameters` of the functions of custom tools; see `param_names`."""
    found = {}
    for index, tool in enumerate(tools or ()):
        if isinstance(tool, dict) and tool.get("type") == "custom":
            path = "custom.format.grammar" if "custom" in tool else "format"
            found[f"tools[{index}].function.parameters"] = f"tools[{index}].{path}.definition"
    return found


def custom_names(tools: Sequence[Mapping[str, Any]] | None) -> frozenset[str]:
    """Names of the custom ones among tools that were found to be right."""
    custom = (tool.get("custom", tool) for tool in tools or () if tool.get("type") == "custom")
    return frozenset(tool["name"] for tool in custom)


def check_names(where: str, tools: Sequence[Mapping[str, Any]], custom: frozenset[str]) -> None:
    """Refuses tools of one name where one of them is a custom one: a call could not say which it means.

    Args:
        where: the field that holds them.
        tools: all of them as functions.
        custom: names of the custom ones.

    Raises:
        RequestError: as said.
    """
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen and name in custom:
            raise bad_value(f"{where}[{index}]", name, "a name that no other tool has, where one of them is custom")
        seen.add(name)


def arguments_for(text: str) -> dict[str, str]:
    """Arguments of the function that stand for an input."""
    return {_INPUT: text}


@dataclass(slots=True)
class InputReader:
    """A custom tool's input from the JSON of its function's arguments, piece by piece.

    Arguments of another form, of models that are not held to theirs, are told as they are.
    """

    _rest: str = ""
    _place: str = "before"

    def push(self, piece: str) -> str:
        """What a further piece of the arguments says of the input."""
        self._rest += piece
        if self._place == "before":
            size = min(len(self._rest), len(_BEGINS))
            if self._rest[:size] != _BEGINS[:size]:
                self._place = "other"
            elif size == len(_BEGINS):
                self._place, self._rest = "within", self._rest[size:]
        if self._place == "other":
            told, self._rest = self._rest, ""
            return told
        return self._read() if self._place == "within" else ""

    def _read(self) -> str:
        told: list[str] = []
        text, at = self._rest, 0
        while at < len(text):
            if found := _PLAIN.match(text, at):
                told.append(found[0])
                at = found.end()
            elif text[at] == '"':
                self._place = "behind"
                break
            elif found := _ESCAPE.match(text, at):
                told.append(json.loads(f'"{found[0]}"').encode("utf-8", "replace").decode())
                at = found.end()
            elif _PARTIAL.fullmatch(text, at):
                break
            else:  # half of a pair without the other, or what is no escape
                found = _HALF.match(text, at)
                told.append(text[at] if found is None else "\ufffd")
                at += 1 if found is None else len(found[0])
        self._rest = text[at:] if self._place == "within" else ""
        return "".join(told)


@dataclass(slots=True)
class CustomCalls:
    """Calls of an answer's tools in the form of OpenAI's chats, those of custom tools as such.

    Attributes:
        names: of the custom tools.
    """

    names: frozenset[str]
    _open: dict[tuple[int, int], InputReader] = field(default_factory=dict)

    def piece(self, sequence: int, piece: ToolCallDelta) -> dict[str, Any]:
        """A piece of a call of one of the answer's sequences."""
        told, key = call_piece(piece), (sequence, piece.index)
        if piece.name in self.names:
            self._open[key] = InputReader()
        if (reader := self._open.get(key)) is None:
            return told
        del told["function"]
        named = {} if piece.id is None else {"type": "custom"}
        custom = {_INPUT: reader.push(piece.arguments)} | ({} if piece.id is None else {"name": piece.name})
        return {**told, **named, "custom": custom}

    def whole(self, pieces: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
        """Calls from all their pieces."""
        return [self._custom(call) for call in whole_calls(pieces)]

    def _custom(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if function["name"] not in self.names:
            return call
        text = InputReader().push(function["arguments"])
        return {"id": call["id"], "type": "custom", "custom": {"name": function["name"], _INPUT: text}}
