"""Answers as models write them, and reading them in pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.text.parsers.format import AnswerFormat, formats
from penstock.text.parsers.parser import AnswerParser
from penstock.text.parsers.render import WrittenCall, render

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where"},
        "days": {"type": "integer", "description": "How long"},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "About"},
        "opt": {"type": "object", "properties": {"a": {"type": "boolean", "description": "?"}}, "description": "More"},
    },
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}
]
SCHEMAS = {"get_weather": SCHEMA}
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Köln \"x\"\nz 'q' <b> 日本 \\n", "days": 3, "tags": ["a", "b"], "opt": {"a": True, "n": None}},
    {"city": "Rome"},
    {},
]


@dataclass(frozen=True)
class Read:
    """All that was told of an answer."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.calls]

    @property
    def arguments(self) -> list[Any]:
        return [json.loads(arguments) for _, _, arguments in self.calls]


def whole(name: str) -> AnswerFormat:
    """One file's format."""
    found = formats()[name]
    return AnswerFormat(found.calls, found.reasoning, found.channels)


def read(
    format: AnswerFormat,
    pieces: Iterable[str],
    tools: Mapping[str, Any] | None = SCHEMAS,
    *,
    short: bool = False,
    **given: Any,
) -> Read:
    """What is told of an answer that comes in pieces; `short`: there was no room for the rest of it."""
    parser = AnswerParser(format, tools=tools, **given)
    news = [part for piece in pieces for part in parser.push(piece)]
    news += parser.finish(short)
    calls: dict[int, list[str]] = {}
    for part in news:
        for piece in part.tool_calls:
            call = calls.setdefault(piece.index, [piece.id or "", piece.name or "", ""])
            call[2] += piece.arguments
    text = "".join(part.text for part in news)
    return Read(text, "".join(part.reasoning for part in news), tuple((a, b, c) for a, b, c in calls.values()))


def cut(text: str, chances: random.Random) -> list[str]:
    """A text in pieces of random length, mostly short."""
    pieces, place = [], 0
    while place < len(text):
        size = chances.choice((1, 1, 2, 3, 5, 8, 40))
        pieces.append(text[place : place + size])
        place += size
    return pieces


def written(name: str, reasoning: str = "", text: str = "", calls: int = 0) -> str:
    """An answer in a format, with so many of ARGUMENTS' calls."""
    made = [WrittenCall("get_weather", arguments) for arguments in ARGUMENTS[:calls]]
    return render(whole(name), reasoning=reasoning, text=text, calls=made)
