"""Reads tool calls: a name, then arguments in one of several syntaxes, given on as JSON while they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from penstock.text.parsers.format import CallsFormat, Syntax, places
from penstock.text.parsers.schema import may_be_other, may_be_string, properties
from penstock.text.parsers.stream import Finder, Reader, Sink, Stream, finding
from penstock.text.parsers.values import MalformedError, ValueReader, as_json, escaped, quoted

_NAME_KEYS: Final = frozenset(("name", "tool_name", "function_name"))
_ARGUMENTS_KEYS: Final = frozenset(("arguments", "parameters", "args"))
_CALL_KEYS: Final = _NAME_KEYS | _ARGUMENTS_KEYS | {"type", "id", "tool_call_id"}
_NAME: Final = re.compile(r"[^\s\"'<>{}()\[\],;]{1,256}")
_TAG_AND_WORD: Final = re.compile(r"(.*[>\]])([\w.:]*)", re.DOTALL)
_IDENTIFIER: Final = re.compile(r"[\w.\-]+")


def _nowhere(text: str) -> None:
    """Takes text that nobody needs."""


@dataclass(frozen=True)
class CallMarks:
    """What is recognised of a format's texts: its marks without the white space around them."""

    format: CallsFormat

    @cached_property
    def lead(self) -> str:
        """What begins a single call, "" if it is the name itself."""
        return self._lead[0]

    @cached_property
    def _lead(self) -> tuple[str, str]:
        """The lead, and what may stand between it and the name."""
        if "{object}" in self.format.call:
            return "", ""
        text = places(self.format.call)[0].strip()
        match = _TAG_AND_WORD.fullmatch(text)
        return (match[1], match[2]) if match else (text, "")

    @cached_property
    def opening(self) -> frozenset[str]:
        """Texts after which calls are expected."""
        return frozenset(_variants(self.format.begin, *self.format.also_begin, self.lead))

    @cached_property
    def ends(self) -> set[str]:
        return _variants(self.format.end, *self.format.also_end)

    @cached_property
    def tail(self) -> str:
        """What ends a single call, after its arguments."""
        return places(self.format.call)[-1].strip()

    @cached_property
    def before_call(self) -> Finder:
        return finding((self.lead, *self.ends))

    @cached_property
    def after_call(self) -> Finder:
        return finding((self.tail,))

    @cached_property
    def closing(self) -> Finder:
        return finding(self.ends)

    @cached_property
    def recovery(self) -> Finder:
        """Where to go on after a call that turned out to be broken."""
        ends = self.ends or _variants(self.tail)
        return finding((*ends, *self.opening) if ends else ())

    @cached_property
    def head(self) -> tuple[Finder, re.Pattern[str]]:
        """What ends the text before the arguments, and where in that text the name is."""
        arguments = self.format.arguments
        pieces = places(self.format.call)
        at = pieces.index("name")
        between = pieces[at + 1 : pieces.index("arguments")]
        ends = [*_variants(between[-1]), self.tail, *self.ends]
        ends += ["{"] if arguments is not Syntax.PARAMETERS else [self.parameter_lead]
        prefix, rest = re.escape(self._lead[1]) + _loose(["", *pieces[1:at]]), _loose(between[:-1])
        return finding(ends), re.compile(rf"(?:{prefix})?(?P<name>\S+?)(?:{rest})?", re.DOTALL)

    @cached_property
    def parameter_lead(self) -> str:
        return places(self.format.parameter)[0].strip()

    @cached_property
    def parameter_head(self) -> tuple[Finder, re.Pattern[str]]:
        """What stands between the beginning of a parameter and its value."""
        pieces = places(self.format.parameter)
        inner = pieces[1 : pieces.index("value")]
        return finding(_variants(inner[-1])), re.compile(rf"(?P<key>.*?)(?:{_loose(inner[1:-1])})?", re.DOTALL)

    @cached_property
    def own_line(self) -> bool:
        """Whether a parameter's value stands on lines of its own."""
        pieces = places(self.format.parameter)
        return pieces[-1].startswith("\n")

    @cached_property
    def value_ends(self) -> Finder:
        end = places(self.format.parameter)[-1].strip()
        quoted = [mark + end for mark in self.format.value_quotes[1:]]
        return finding((end, "\n" + end, *quoted) if self.own_line else (end, *quoted))

    @cached_property
    def parameter_next(self) -> Finder:
        return finding((self.parameter_lead, self.tail, *self.ends))


def _object_in(value: str) -> str:
    """The object that a JSON value is or, as a string, spells out; an empty one if neither."""
    if value.startswith('"'):
        value = as_json(json.loads(value)) or ""
    return value if value.startswith("{") else "{}"


def _variants(*texts: str) -> set[str]:
    """Texts without white space around them, and without any."""
    return {found for text in texts for found in (text.strip(), "".join(text.split())) if found}


def _loose(pieces: list[str]) -> str:
    """A pattern of texts and places, the white space of the texts left free."""
    pattern = ""
    for number, piece in enumerate(pieces):
        if number % 2:
            pattern += f"(?P<{piece}>.*?)"
        else:
            pattern += r"\s*".join(map(re.escape, re.split(r"\s+", piece)))
    return pattern


@dataclass(slots=True)
class _ObjectCall:
    """What is known of a call that is one object; `held` are arguments that came before the name."""

    name: str = ""
    announced: bool = False
    held: list[str] = field(default_factory=list)


@dataclass(slots=True)
class CallReader:
    """Reads the calls of one answer.

    Attributes:
        stream: where from.
        shape: how they are written.
        tools: parameter schemas by the function's name.
        announce: told each call's name before its arguments.
        argue: takes the arguments of the call announced last.
    """

    stream: Stream
    shape: CallMarks
    tools: Mapping[str, Any]
    announce: Callable[[str], None]
    argue: Sink
    _sent: bool = field(default=False)

    def section(self, mark: str) -> Reader[None]:
        """Reads the calls after one of the shape's opening marks, which was read, to their end.

        Raises:
            MalformedError: this is no call; or, after it was announced, what could be told of it was.
        """
        shape, stream = self.shape, self.stream
        if mark and mark == shape.lead:
            yield from self._named()
            if shape.format.begin:
                yield from self._further()
            return
        char = yield from stream.spaces()
        if shape.format.arguments is Syntax.PYTHON:
            yield from self._pythonic(char)
        elif "{object}" in shape.format.call or (char in "{[" and char and shape.format.arguments is Syntax.JSON):
            yield from self._objects(char)
        elif shape.lead:
            yield from self._further()
            return
        else:
            yield from self._named()
        yield from stream.spaces()
        yield from stream.follows(shape.closing)

    def call_to(self, name: str) -> Reader[None]:
        """A call whose name stood elsewhere: its arguments follow.

        Raises:
            MalformedError: as `section`.
        """
        self._call(name)
        yield from self._arguments()

    def _begin(self) -> None:
        if self.stream.log is None:
            self.stream.start_log()

    def _call(self, name: str) -> None:
        if not _NAME.fullmatch(name) or (self.shape.format.bare and name not in self.tools):
            raise MalformedError
        self._sent = False
        self.stream.end_log()
        self.announce(name)

    def _send(self, text: str) -> None:
        if text:
            self._sent = True
            self.argue(text)

    def _further(self) -> Reader[None]:
        """Calls that begin with the lead, until the section's end or other text."""
        while True:
            self._begin()
            if not (yield from self.stream.spaces()):
                self.stream.end_log()
                return
            mark = yield from self.stream.follows(self.shape.before_call)
            if mark in self.shape.ends:
                return
            if not mark:
                raise MalformedError
            yield from self._named()

    def _named(self) -> Reader[None]:
        """A call after its lead: head, arguments, tail."""
        stream, (ends, pattern) = self.stream, self.shape.head
        parts: list[str] = []
        mark = yield from stream.until(ends, parts.append)
        found = pattern.fullmatch("".join(parts).strip())
        if not mark or not found:
            raise MalformedError
        self._call(found["name"])
        if mark in ("{", self.shape.tail, *self.shape.ends) or mark == self.shape.parameter_lead:
            stream.unread(mark)
        if self.shape.format.arguments is Syntax.PARAMETERS:
            yield from self._parameters(found["name"])
        else:
            yield from self._arguments()
        yield from stream.spaces()
        yield from stream.follows(self.shape.after_call)

    def _arguments(self) -> Reader[None]:
        """A JSON object, or what stands for one."""
        char = yield from self.stream.spaces()
        try:
            if char == "{":
                yield from ValueReader(self.stream, self._send, self.shape.format.quotes).read()
            elif char == '"':
                yield from self._quoted_arguments()
            elif char.isalpha():  # null
                yield from ValueReader(self.stream, _nowhere).read()
        finally:
            if not self._sent and not self.stream.broke_off:
                self._send("{}")

    def _quoted_arguments(self) -> Reader[None]:
        """An object written as a string."""
        self._send(_object_in(quoted((yield from ValueReader(self.stream, _nowhere).key()))))

    def _objects(self, char: str) -> Reader[None]:
        """One object, several, or a list of them."""
        stream = self.stream
        if char not in "{[" or not char:
            raise MalformedError
        if char == "[":
            stream.skip(1)
        closing = "]" if char == "[" else ""
        while True:
            self._begin()
            following = yield from stream.spaces()
            if following and following == closing:
                stream.skip(1)
                return
            if following and following in ",;":
                stream.skip(1)
            elif following == "{":
                stream.skip(1)
                yield from self._keyed() if self.shape.format.keyed else self._object()
            elif closing:
                raise MalformedError
            else:
                return

    def _object(self) -> Reader[None]:
        """{"name": …, "arguments": …}, in any order, other members left out; its brace is read."""
        call = _ObjectCall()
        try:
            yield from self._members(call)
        except MalformedError:
            if call.name and not call.announced and self.stream.broke_off:
                self._call(call.name)
            raise
        self.stream.skip(1)
        if not call.announced:
            self._call(call.name)
            self._send("{}")

    def _members(self, call: _ObjectCall) -> Reader[None]:
        """Those of an object, up to its brace."""
        stream = self.stream
        keys = ValueReader(stream, _nowhere)
        while (char := (yield from stream.spaces())) != "}":
            if char == ",":
                stream.skip(1)
                continue
            key = yield from self._key(keys)
            if self.shape.format.bare and not call.announced and key not in _CALL_KEYS:
                raise MalformedError
            if key in _NAME_KEYS and not call.name:
                call.name = yield from keys.key()
                if call.held:
                    self._call(call.name)
                    call.announced = True
                    self._send(_object_in("".join(call.held)))
            elif key in _ARGUMENTS_KEYS and call.name and not call.announced:
                self._call(call.name)
                call.announced = True
                yield from self._arguments()
            elif key in _ARGUMENTS_KEYS and not call.held and not call.announced:
                yield from ValueReader(stream, call.held.append).read()
            else:
                yield from ValueReader(stream, _nowhere).read()

    def _keyed(self) -> Reader[None]:
        """{"NAME": {…}}; its brace is read."""
        name = yield from self._key(ValueReader(self.stream, _nowhere))
        self._call(name)
        yield from self._arguments()
        if (yield from self.stream.spaces()) != "}":
            raise MalformedError
        self.stream.skip(1)

    def _key(self, keys: ValueReader) -> Reader[str]:
        key = yield from keys.key()
        if (yield from self.stream.spaces()) != ":":
            raise MalformedError
        self.stream.skip(1)
        return key

    def _parameters(self, name: str) -> Reader[None]:
        """Tagged parameters up to the call's tail, which is left."""
        stream = self.stream
        shape = self.shape
        known = properties(self.tools.get(name))
        separator = "{"
        ends, pattern = shape.parameter_head
        try:
            while True:
                if not (yield from stream.spaces()):
                    return
                mark = yield from stream.follows(shape.parameter_next)
                if mark != shape.parameter_lead:
                    if not mark:
                        raise MalformedError
                    stream.unread(mark)
                    return
                parts: list[str] = []
                if not (yield from stream.until(ends, parts.append)):
                    return
                found = pattern.fullmatch("".join(parts))
                if not found:
                    raise MalformedError
                key = found["key"].strip()
                self._send(f"{separator}{quoted(key)}: ")
                separator = ", "
                yield from self._value(known.get(key), found.groupdict())
        finally:
            if not stream.broke_off:
                self._send("{}" if separator == "{" else "}")

    def _value(self, schema: Any, told: Mapping[str, str]) -> Reader[None]:
        """A parameter's text up to its end mark: a string or JSON, as the schema or the tag says."""
        stream, shape = self.stream, self.shape
        if shape.own_line and (yield from stream.peek()) == "\n":
            stream.skip(1)
        yield from stream.follows(finding(shape.format.value_quotes[:1]))
        kind = told.get("string") or told.get("type")
        text_only = kind in ("true", "string") if kind else not may_be_other(schema)
        if text_only:
            self._send('"')
            mark = yield from stream.until(shape.value_ends, lambda part: self._send(escaped(part)), begun=False)
            if mark or not stream.broke_off:
                self._send('"')
            return
        parts: list[str] = []
        if not (yield from stream.until(shape.value_ends, parts.append)) and stream.broke_off:
            return  # its end would have told of what type it is
        text = "".join(parts)
        found = as_json(text)
        if found is None or (found[0] == '"' and kind is None and may_be_string(schema)):
            found = quoted(text)
        self._send(found)

    def _pythonic(self, char: str) -> Reader[None]:
        """name(key=value, …) once or often, in a list or on lines of their own."""
        stream = self.stream
        closing = "]" if char == "[" else ""
        if closing:
            stream.skip(1)
        called = False
        while True:
            self._begin()
            following = yield from stream.spaces()
            if following and following == closing:
                stream.skip(1)
                return
            if following and following in ",;":
                stream.skip(1)
            elif following and _IDENTIFIER.match(following):
                yield from self._python_call()
                called = True
            elif closing or not called:
                raise MalformedError
            else:
                return

    def _python_call(self) -> Reader[None]:
        stream = self.stream
        name = yield from self._identifier()
        if (yield from stream.spaces()) != "(":
            raise MalformedError
        stream.skip(1)
        self._call(name)
        order = list(properties(self.tools.get(name)))
        separator, number = "{", 0
        try:
            while (char := (yield from stream.spaces())) != ")":
                if char == ",":
                    stream.skip(1)
                    continue
                key = yield from self._python_key(order, number)
                number += 1
                yield from ValueReader(stream, self._send, pending=f"{separator}{quoted(key)}: ").read()
                separator = ", "
        finally:
            if not stream.broke_off:
                self._send("}" if self._sent else "{}")
        stream.skip(1)

    def _identifier(self) -> Reader[str]:
        name = ""
        while (yield from self.stream.peek()) and (part := self.stream.run(_IDENTIFIER)):
            name += part
        return name

    def _python_key(self, order: list[str], number: int) -> Reader[str]:
        """The name before "=", or that of the parameter at this position."""
        name = yield from self._identifier()
        if name and (yield from self.stream.spaces()) == "=":
            self.stream.skip(1)
            return name
        if number >= len(order):
            raise MalformedError
        if name:
            self.stream.unread(name)
        return order[number]
