"""Writes reasoning, content and calls as a model would: the other direction of reading them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.text.parsers.format import AnswerFormat, CallsFormat, Syntax, places


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A whole call, its arguments decoded."""

    name: str
    arguments: Mapping[str, Any]
    id: str = "123456789"


def render(format: AnswerFormat, *, reasoning: str = "", text: str = "", calls: Sequence[WrittenCall] = ()) -> str:
    """An answer as the model writes it after a prompt that has opened nothing."""
    if format.channels is not None:
        return _messages(format, reasoning, text, calls)
    thought = ""
    if reasoning and format.reasoning is not None:
        thought = f"{format.reasoning.begin}\n{reasoning}\n{format.reasoning.end}\n\n"
    return thought + text + (render_calls(format.calls, calls) if calls and format.calls else "")


def render_calls(format: CallsFormat, calls: Sequence[WrittenCall]) -> str:
    """Calls with everything around them."""
    texts = [render_call(format, index, call) for index, call in enumerate(calls)]
    if format.each:
        return format.separator.join(f"{format.begin}{text}{format.end}" for text in texts)
    joined = format.separator.join(texts)
    return format.begin + (f"[{joined}]" if format.list else joined) + format.end


def render_call(format: CallsFormat, index: int, call: WrittenCall) -> str:
    """One call without what stands around all of them."""
    plain = {"id": call.id, "index": str(index), "number": str(index + 1)}
    if "{object}" in format.call:
        words = {**plain, "name": _json(call.name), "arguments": _json(call.arguments)}
        return _filled(format.call, {"object": _filled(format.object, words)})
    arguments = _WRITERS[format.arguments](format, call.arguments)
    return _filled(format.call, {**plain, "name": call.name, "arguments": arguments})


def _filled(text: str, values: Mapping[str, str]) -> str:
    pieces = places(text)
    return "".join(values[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_json(format: CallsFormat, arguments: Mapping[str, Any]) -> str:
    return _json(arguments)


def _as_python(format: CallsFormat, arguments: Mapping[str, Any]) -> str:
    def written(value: Any) -> str:
        return repr(value) if value is None or isinstance(value, bool) else _json(value)

    return ", ".join(f"{name}={written(value)}" for name, value in arguments.items())


def _as_gemma(format: CallsFormat, arguments: Mapping[str, Any]) -> str:
    mark = format.quotes[0]

    def written(value: Any) -> str:
        if isinstance(value, str):
            return mark + value + mark
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{name}:{written(entry)}" for name, entry in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return _json(value)

    return written(arguments)


def _as_parameters(format: CallsFormat, arguments: Mapping[str, Any]) -> str:
    def filled(key: str, value: Any) -> str:
        text = isinstance(value, str)
        kinds = {bool: "boolean", int: "number", float: "number", list: "array", dict: "object", type(None): "null"}
        words = {"string": "true" if text else "false", "type": "string" if text else kinds[type(value)]}
        return _filled(format.parameter, {**words, "key": key, "value": value if text else _json(value)})

    return "".join(filled(key, value) for key, value in arguments.items())


_WRITERS: Mapping[Syntax, Callable[[CallsFormat, Mapping[str, Any]], str]] = {
    Syntax.JSON: _as_json,
    Syntax.PYTHON: _as_python,
    Syntax.GEMMA: _as_gemma,
    Syntax.PARAMETERS: _as_parameters,
}


def _messages(format: AnswerFormat, reasoning: str, text: str, calls: Sequence[WrittenCall]) -> str:
    """Messages one after another; the turn's opening, which the prompt holds, stands between them."""
    thinks = format.reasoning
    shape = format.calls
    channels = format.channels
    assert channels is not None
    parts = []
    if reasoning and thinks is not None:
        parts.append(thinks.begin + reasoning + thinks.end)
    if text:
        parts.append(channels.content + text + channels.ends[0])
    if shape is not None:
        parts += [render_call(shape, index, call) for index, call in enumerate(calls)]
    return channels.turn.join(parts)
