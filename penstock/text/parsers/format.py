"""How models write reasoning and tool calls: one data file a format, read into the types here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

from penstock.config.errors import ParameterError

_PLACE: Final = re.compile(r"\{(object|name|arguments|id|index|number|key|value|string|type)\}")


class Syntax(str, Enum):
    """How arguments are written."""

    JSON = "json"
    PYTHON = "python"  # name=value, …
    GEMMA = "gemma"  # {name:value,…} with own string quotes
    PARAMETERS = "parameters"  # one tagged piece of text a parameter; its type is the schema's


class CallIds(str, Enum):
    """How a call's id is made."""

    CALL = "call"  # call_ and 24 hexadecimal digits
    MISTRAL = "mistral"  # 9 letters and digits
    KIMI = "kimi"  # functions.NAME:INDEX, counted over the conversation


@dataclass(frozen=True, slots=True)
class CallsFormat:
    """How calls are written. Texts hold places in braces: {name}, {arguments}, {object}, {index}, {id} …

    Attributes:
        call: one call; with {object} a JSON object that holds both name and arguments.
        object: that object; {name} is a JSON string there.
        keyed: the object's only key is the function's name.
        begin, end: around all calls, or around each one (`each`). White space at their ends is not needed to be
            recognised.
        also_begin, also_end: further texts that begin and end calls, accepted and never written.
        separator: between calls, or between sections of one call each.
        list: the calls are a JSON list.
        bare: no text marks calls; what begins an answer and names one of the request's functions is one.
        arguments, parameter: how arguments, and each of them, are written.
        quotes: strings that open and close a string value, besides quotation marks.
        value_quotes: what may open and close a parameter's text and does not belong to it.
        ids: how ids are made.
    """

    call: str
    object: str = '{"name": {name}, "arguments": {arguments}}'
    keyed: bool = False
    begin: str = ""
    end: str = ""
    also_begin: tuple[str, ...] = ()
    also_end: tuple[str, ...] = ()
    separator: str = ""
    each: bool = False
    list: bool = False
    bare: bool = False
    arguments: Syntax = Syntax.JSON
    parameter: str = ""
    quotes: tuple[str, ...] = ()
    value_quotes: tuple[str, ...] = ()
    ids: CallIds = CallIds.CALL


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How reasoning is marked.

    Attributes:
        begin, end: around it. A prompt that ends with `begin` has opened it.
        also_begin, also_end: further texts that do the same.
        assumed: an answer begins with reasoning even if nothing opened it.
        calls_end: the beginning of a call ends reasoning too.
        dropped: texts around the content, left out of it.
    """

    begin: str
    end: str
    also_begin: tuple[str, ...] = ()
    also_end: tuple[str, ...] = ()
    assumed: bool = False
    calls_end: bool = False
    dropped: tuple[str, ...] = ()

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin, *self.also_begin)

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end, *self.also_end)


@dataclass(frozen=True, slots=True)
class ChannelsFormat:
    """Answers made of messages, whose heads say what they are (Harmony, of gpt-oss).

    Attributes:
        openers: what a head begins with; an answer that begins otherwise is content.
        message: ends a head.
        ends: end a message.
        reasoning: a head with this text in it leads reasoning.
        recipient: comes before a function's name in a head that leads a call.
        content: the head of content.
        turn: stands before the head of each message but the first, whose turn the prompt has opened.
    """

    openers: tuple[str, ...]
    message: str
    ends: tuple[str, ...]
    reasoning: str
    recipient: str
    content: str
    turn: str


@dataclass(frozen=True, slots=True)
class Format:
    """One data file.

    Attributes:
        about: which models write so.
        tool_names, reasoning_names: for --tool-call-parser and --reasoning-parser; the first is its own.
        detect_calls, detect_reasoning: a chat template is of this format if it contains all strings of one of the
            lists, and none of those with a "!" before them; the format with the longest strings wins.
        calls, reasoning: the two parts, each may lack.
    """

    about: str
    tool_names: tuple[str, ...] = ()
    reasoning_names: tuple[str, ...] = ()
    detect_calls: tuple[tuple[str, ...], ...] = ()
    detect_reasoning: tuple[tuple[str, ...], ...] = ()
    calls: CallsFormat | None = None
    reasoning: ReasoningFormat | None = None
    channels: ChannelsFormat | None = None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers: the parts, each None where there is none, and the names of their formats."""

    calls: CallsFormat | None = None
    reasoning: ReasoningFormat | None = None
    channels: ChannelsFormat | None = None
    tool_name: str = ""
    reasoning_name: str = ""
    marks: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "marks", tuple(_marks(self)))


def places(text: str) -> list[str]:
    """A text cut at its places: texts at even positions, names of places at odd ones."""
    return _PLACE.split(text)


@lru_cache(maxsize=1)
def formats() -> Mapping[str, Format]:
    """All formats by the name of their file."""
    folder = files("penstock.text") / "formats"
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".toml")), key=lambda entry: entry.name)
    return {entry.name.removesuffix(".toml"): _format(tomllib.loads(entry.read_text("utf-8"))) for entry in found}


def choose(template: str, tools: str | None = None, reasoning: str | None = None) -> AnswerFormat:
    """The format of a model's answers.

    Args:
        template: source of the model's chat template, "" for none; the format is found by what is in it.
        tools, reasoning: names that count for more; "none" switches that part off.

    Raises:
        ParameterError: an unknown name.
    """
    found = _chosen("tool-call-parser", "tool_names", "detect_calls", template, tools)
    thought = _chosen("reasoning-parser", "reasoning_names", "detect_reasoning", template, reasoning)
    return AnswerFormat(
        found.calls if found else None,
        thought.reasoning if thought else None,
        (found.channels if found else None) or (thought.channels if thought else None),
        (tools or found.tool_names[0]) if found else "",
        (reasoning or thought.reasoning_names[0]) if thought else "",
    )


def names(kind: str) -> list[str]:
    """All names of one kind ("tool_names" or "reasoning_names")."""
    return sorted({name for entry in formats().values() for name in getattr(entry, kind)})


def _chosen(option: str, kind: str, detect: str, template: str, name: str | None) -> Format | None:
    """The format of a name; of several with that name, and without one, that which the template is of."""
    if name == "none":
        return None
    named = [entry for entry in formats().values() if name is None or name in getattr(entry, kind)]
    if not named:
        raise ParameterError(option, name, f"none, {', '.join(names(kind))}; left out, the chat template tells")
    return _detected(named, detect, template) or (named[0] if name else None)


def _detected(candidates: Sequence[Format], kind: str, template: str) -> Format | None:
    best, score = None, 0
    for entry in candidates:
        for rule in getattr(entry, kind):
            size = sum(len(text) for text in rule if text[0] != "!")
            if size > score and all((text.removeprefix("!") in template) == (text[0] != "!") for text in rule):
                best, score = entry, size
    return best


def _marks(format: AnswerFormat) -> Sequence[str]:
    """All literal texts of a format, in which a tokenizer's special tokens are looked for."""
    calls = format.calls
    reasoning = format.reasoning
    channels = format.channels
    marks = list[str]()
    if calls is not None:
        texts = (calls.begin, calls.end, calls.call, calls.separator, calls.parameter)
        for text in (*texts, *calls.also_begin, *calls.also_end):
            marks += places(text)[::2]
        marks += (*calls.quotes, *calls.value_quotes)
    if reasoning is not None:
        marks += (*reasoning.begins, *reasoning.ends, *reasoning.dropped)
    if channels is not None:
        marks += (*channels.openers, channels.message, *channels.ends, channels.reasoning)
    return [mark for mark in dict.fromkeys(marks) if mark]


def _format(data: Mapping[str, Any]) -> Format:
    return Format(
        **{name: _PARTS[name](**_frozen(value)) if name in _PARTS else _frozen(value) for name, value in data.items()}
    )


def _frozen(value: Any, name: str = "") -> Any:
    """Tuples for lists, and for a table's words what they stand for."""
    if isinstance(value, dict):
        return {key: _frozen(entry, key) for key, entry in value.items()}
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return _WORDS[name](value) if name in _WORDS else value


_WORDS: Final = {"arguments": Syntax, "ids": CallIds}
_PARTS: Final = {"calls": CallsFormat, "reasoning": ReasoningFormat, "channels": ChannelsFormat}
